// Files that the page gives to its user.

/**
 * Have the browser save a text as a file.
 * @param {string} name
 * @param {string} text
 * @param {string} type Its media type.
 */
export function download(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = document.createElement("a");
  Object.assign(link, { href: url, download: name });
  link.click();
  // The browser reads the file after the click.
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}
