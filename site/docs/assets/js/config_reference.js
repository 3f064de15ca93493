// The configuration reference: a box that leaves only the keys in which its words occur, and folds that open for links.

(() => {
  "use strict"
  const place = document.getElementById("key-filter")
  const sections = [...document.querySelectorAll(".key-section")]
  const rows = [...document.querySelectorAll(".keys tbody tr")]
  place.innerHTML = '<label>find a key or a word <input type="search" autocomplete="off"></label> <span role="status"></span>'
  const input = place.querySelector("input"), found = place.querySelector("span")

  function filter() {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean)
    for (const row of rows) {
      const key = row.querySelector("td a").id, text = `${key} ${row.textContent}`.toLowerCase()
      row.hidden = !words.every((word) => text.includes(word))
    }
    const left = (part) => part.querySelectorAll("tbody tr:not([hidden])").length
    for (const fold of document.querySelectorAll(".key-section details")) {
      fold.hidden = !left(fold)
      fold.open = Boolean(words.length) && !fold.hidden
    }
    for (const table of document.querySelectorAll(".keys")) table.hidden = !left(table)
    for (const section of sections) section.hidden = !left(section)
    const count = rows.filter((row) => !row.hidden).length
    found.textContent = words.length ? `${count} of ${rows.length} keys` : ""
  }

  // A link to a key that is folded away, or filtered out, still leads to it.
  function unfold() {
    const key = document.getElementById(decodeURIComponent(location.hash.slice(1)))
    if (!key || !key.closest(".keys")) return
    if (key.closest("[hidden]")) {
      input.value = ""
      filter()
    }
    const fold = key.closest("details")
    if (fold) fold.open = true
    key.scrollIntoView({ block: "center" })
  }

  input.addEventListener("input", filter)
  window.addEventListener("hashchange", unfold)
  unfold()
})()
