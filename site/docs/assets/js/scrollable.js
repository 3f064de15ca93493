// What can be scrolled sideways must be reachable with the keyboard: tables, drawings and long formulas.
const WIDE = ".md-typeset__scrollwrap, .drawing, .arithmatex, .output"

function markScrollable() {
  for (const element of document.querySelectorAll(WIDE)) {
    const scrolls = element.scrollWidth > element.clientWidth + 1 && getComputedStyle(element).overflowX !== "visible"
    if (scrolls) {
      element.tabIndex = 0
      element.setAttribute("role", "region")
      element.setAttribute("aria-label", "can be scrolled sideways")
    } else if (element.getAttribute("role") === "region") {
      element.removeAttribute("tabindex")
      element.removeAttribute("role")
      element.removeAttribute("aria-label")
    }
  }
}

window.addEventListener("load", markScrollable)
window.addEventListener("resize", markScrollable)
document.addEventListener("toggle", markScrollable, true) // what was folded has a width from now on
