"use strict";
// KaTeX lies beside this site, so formulas are set without any network.
document.querySelectorAll(".arithmatex").forEach((element) => {
  renderMathInElement(element, {
    delimiters: [{ left: "\\(", right: "\\)", display: false }, { left: "\\[", right: "\\]", display: true }],
    throwOnError: false,
    errorColor: "#b00020",
  });
});
