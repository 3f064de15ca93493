// What can be scrolled sideways must be reachable with the keyboard: tables, drawings and long formulas.
const WIDE = ".md-typeset__scrollwrap, .drawing, .arithmatex, .output, .output figure"

// Regions of a page need different names: each has its number, and its heading.
function nameOf(element, number) {
  const headings = [...document.querySelectorAll("article :is(h1, h2, h3, h4)")]
  const above = (heading) => heading.compareDocumentPosition(element) & Node.DOCUMENT_POSITION_FOLLOWING
  const heading = headings.filter(above).pop()
  const title = heading ? heading.textContent.replace("¶", "").trim() : document.title
  return `${title}, part ${number}: can be scrolled sideways`
}

function markScrollable() {
  let number = 0
  for (const element of document.querySelectorAll(WIDE)) {
    const scrolls = element.scrollWidth > element.clientWidth + 1 && getComputedStyle(element).overflowX !== "visible"
    if (scrolls) {
      element.tabIndex = 0
      element.setAttribute("role", "region")
      element.setAttribute("aria-label", nameOf(element, ++number))
    } else if (element.getAttribute("role") === "region") {
      element.removeAttribute("tabindex")
      element.removeAttribute("role")
      element.removeAttribute("aria-label")
    }
  }
}

// The theme wraps the buttons of each block of code in a <nav>. A page with many blocks has too many landmarks then.
function groupButtons() {
  for (const buttons of document.querySelectorAll("nav.md-code__nav:not([role])")) buttons.setAttribute("role", "group")
}

window.addEventListener("load", markScrollable)
window.addEventListener("resize", markScrollable)
document.addEventListener("toggle", markScrollable, true) // what was folded has a width from now on
new MutationObserver(groupButtons).observe(document.body, { childList: true, subtree: true })
groupButtons()
