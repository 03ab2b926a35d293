// The page's policy forbids inline scripts, so the call has its own file.

// Swagger UI's curl command, with -N: curl then shows each event of a stream as it comes.
const streamingCurl = (system) => ({
  fn: {
    requestSnippetGenerator_curl_stream: (request) =>
      system.getSystem().fn.requestSnippetGenerator_curl_bash(request).replace(/^curl /, "curl -N "),
  },
});

SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#swagger-ui",
  deepLinking: true,
  // By default, Swagger UI sends the document to a validator on the internet.
  validatorUrl: null,
  plugins: [streamingCurl],
  requestSnippetsEnabled: true,
  requestSnippets: {
    generators: { curl_stream: { title: "curl", syntax: "bash" } },
    languages: ["curl_stream"],
  },
});
