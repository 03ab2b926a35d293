// Pictures that a user chooses, drops or pastes, as data: URIs.

const TYPES = new Set(["image/png", "image/jpeg", "image/webp", "image/gif"]);

/**
 * Read the files that are pictures.
 * @param {File[]} files
 * @returns {Promise<{uris: string[], problem: string}>} The problem tells of files that are none.
 */
export async function readImages(files) {
  const pictures = files.filter(({ type }) => TYPES.has(type));
  const uris = await Promise.all(pictures.map(read));
  const problem = pictures.length < files.length ? "Only PNG, JPEG, WebP and GIF pictures can be sent." : "";
  return { uris, problem };
}

/** @param {File} file @returns {Promise<string>} */
const read = (file) =>
  new Promise((done, fail) => {
    const reader = new FileReader();
    reader.onload = () => done(String(reader.result));
    reader.onerror = () => fail(reader.error);
    reader.readAsDataURL(file);
  });
