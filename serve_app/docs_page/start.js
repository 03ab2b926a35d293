// The page's policy allows no inline script, so the call stands in a file of its own.
SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#swagger-ui",
  deepLinking: true,
  // Swagger would else send the document to a validator on the internet.
  validatorUrl: null,
});
