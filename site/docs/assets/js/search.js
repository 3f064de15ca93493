// What is typed or pasted into the search is looked for by its words. The theme takes signs for operators and lets
// every word match whatever begins with it, so in a pasted message "a", "no" and "7" would outweigh the rest.
const FEW = 3
const WEAK = new Set(
  ("a all also an and any are as at be been but by can cannot could did do each else every for from get had " +
  "has have how if in into is it its least like may most must my no nor not now of off on one only or other " +
  "our own rather said say says see she should since so some than that the their them then there these they this " +
  "to too us was were what when where which while who whom why will with would yet you your").split(" "))

// Other people's names for what has another name here.
const NAMES = [[/\bzero[-_ ]?([0-3])\b/gi, "stage $1"], [/\bmulti[-_ ]?nodes?\b/gi, "several nodes"]]

function wordsOf(asked) {
  const typed = NAMES.reduce((text, [name, here]) => text.replace(name, here), asked)
  const words = typed.match(/[\p{L}\p{N}_]+/gu) || []
  const telling = words.filter(word => !WEAK.has(word.toLowerCase()))
  const long = telling.filter(word => word.length > 2 && !/^\d+$/.test(word))
  return (words.length > FEW && long.length ? long : telling.length ? telling : words).join(" ")
}

const box = document.querySelector("[data-md-component=search-query]")
const typed = Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value")
Object.defineProperty(box, "value", {
  get() { return wordsOf(typed.get.call(this)) },
  set(text) { typed.set.call(this, text) },
})
