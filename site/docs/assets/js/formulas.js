// Formulas are in the page as TeX between \( \) or \[ \]; KaTeX replaces them (and adds MathML for screen readers).
for (const element of document.querySelectorAll(".arithmatex")) {
  const tex = element.textContent.trim()
  katex.render(tex.slice(2, -2), element, { displayMode: tex.startsWith("\\["), throwOnError: false })
}
