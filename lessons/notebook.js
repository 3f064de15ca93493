// The boxes and sliders of the notebooks' outputs. It stands behind each of them, and looks after those that are new.
(() => {
  "use strict"
  const fresh = (kind) => document.querySelectorAll(`.zero-${kind}:not([data-ready])`)
  // 1,000 and 1 000 are a thousand, 0,5 is a half, 3/4 is three quarters.
  const number = (text) => {
    const one = (word) => {
      const plain = word.trim().replace(/(\d)[ _\u00a0](?=\d)/g, "$1")
      const whole = /^-?\d{1,3}(,\d{3})+(\.\d+)?$/.test(plain)
      return plain === "" ? NaN : Number(whole ? plain.replace(/,/g, "") : plain.replace(",", "."))
    }
    const parts = text.split("/").map(one)
    return parts.length === 2 ? parts[0] / parts[1] : parts.length === 1 ? parts[0] : NaN
  }
  const verdict = (text, { truth, hint }) => {
    const guess = number(text), wanted = Number(truth)
    if (!Number.isFinite(guess)) return [false, "Write a number."]
    if (Math.abs(guess - wanted) <= 0.005 * Math.max(1, Math.abs(wanted))) return [true, "Right."]
    return [false, `Measured is ${wanted > guess ? "more" : "less"}. ${hint}`]
  }
  for (const box of fresh("predict")) {
    box.dataset.ready = "yes"
    const field = box.querySelector("input"), said = box.querySelector("output")
    const answer = () => {
      const [right, words] = verdict(field.value, box.dataset)
      said.textContent = words
      if (right) box.querySelector("details").open = true
    }
    box.querySelector("button").addEventListener("click", answer)
    field.addEventListener("keydown", (event) => {
      event.stopPropagation() // in Jupyter a digit is also a command
      if (event.key === "Enter") answer()
    })
  }
  for (const slider of fresh("slider")) {
    slider.dataset.ready = "yes"
    const range = slider.querySelector("input"), said = slider.querySelector("output")
    const frames = slider.querySelector(".zero-frames").children
    range.addEventListener("input", () => {
      for (const [place, frame] of [...frames].entries()) frame.hidden = place !== range.valueAsNumber
      said.textContent = frames[range.valueAsNumber].dataset.value
      range.setAttribute("aria-valuetext", said.textContent)
      window.dispatchEvent(new Event("resize")) // a page looks again at what can be scrolled
    })
    range.addEventListener("keydown", (event) => event.stopPropagation())
  }
})()
