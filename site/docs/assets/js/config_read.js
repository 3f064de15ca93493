// JSON with comments and a last comma, and where each key stands: zero_full/config/json_parser.py once more, which says why.
// A classic script and not a module: Chromium loads no modules from file://. Everything is in `zeroRead`.

const zeroRead = (() => {
  "use strict"
  const SPACE = /(?:[ \t\r\n]|\/\/[^\n]*|#[^\n]*|\/\*[^]*?\*\/)*/y
  const STRING = /"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*/y // up to its last quote
  const NUMBER = /-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?/y
  const WORD = /[A-Za-z_]+|-Infinity/y
  const WORDS = { true: true, false: false, null: null, NaN: NaN, Infinity: Infinity, "-Infinity": -Infinity }
  const own = (table, name) => (Object.hasOwn(table, name) ? table[name] : undefined)

  class NotJson extends Error {
    constructor(why, remedy, place) {
      super(remedy ? `${why}; ${remedy}` : why)
      Object.assign(this, { why, remedy, place })
    }
  }

  // Paths are lists of names and numbers; as keys of a Map they are written as JSON.
  const keyOf = (path) => JSON.stringify(path)

  // {value, places: Map of path to {path, line, column}, repeated: [[path, place]]}; throws NotJson.
  function parse(text) {
    const places = new Map(), repeated = []
    let at = 0

    function place() {
      const before = text.slice(0, at), lines = before.split("\n")
      return { line: lines.length, column: [...lines[lines.length - 1]].length + 1 }
    }

    function matched(pattern) {
      pattern.lastIndex = at
      return pattern.exec(text)
    }

    const broken = (why, remedy = "") => new NotJson(`this is not JSON: ${why}`, remedy, place())
    const space = () => (at += matched(SPACE)[0].length)
    const comes = (sign) => text.startsWith(sign, at)

    function takes(sign) {
      if (!comes(sign)) return false
      at += sign.length
      space()
      return true
    }

    function value(path) {
      if (path.length > zeroConfig.deepest) {
        throw new NotJson(`nested more than ${zeroConfig.deepest} levels deep, which no key needs`, "", place())
      }
      if (takes("{")) return object(path)
      if (takes("[")) return list(path)
      return comes('"') ? string() : scalar()
    }

    function note(path) {
      places.set(keyOf(path), { path, ...place() })
    }

    function object(path) {
      const made = new Map()
      while (!takes("}")) {
        if (!comes('"')) throw broken("expected a key in double quotes or a }")
        const here = place(), name = string(), key = [...path, name]
        if (made.has(name)) repeated.push([key, here])
        places.set(keyOf(key), { path: key, ...here })
        space()
        if (!takes(":")) throw broken("expected a : between a key and its value")
        made.set(name, value(key))
        between("}")
      }
      return made
    }

    function list(path) {
      const made = []
      while (!takes("]")) {
        const item = [...path, made.length]
        note(item)
        made.push(value(item))
        between("]")
      }
      return made
    }

    function between(end) {
      space()
      if (!takes(",") && !comes(end)) throw broken(`expected a comma or a ${end}`)
    }

    function string() {
      const start = at
      at += matched(STRING)[0].length
      if (!comes('"')) {
        throw broken("a string must end with a double quote on its line, and \\ is written \\\\")
      }
      at += 1
      return JSON.parse(text.slice(start, at))
    }

    function scalar() {
      const number = matched(NUMBER), word = matched(WORD)
      if (word && Object.hasOwn(WORDS, word[0])) {
        at += word[0].length
        return WORDS[word[0]]
      }
      if (!number) {
        const meant = word && own(zeroConfig.otherWords, word[0])
        throw broken("expected a value", meant ? `write ${meant}` : "put strings in double quotes")
      }
      if (number[0].length > zeroConfig.digits) throw broken(`a number has more than ${zeroConfig.digits} digits`)
      at += number[0].length
      return number[1] || number[2] ? Number(number[0]) : BigInt(number[0])
    }

    space()
    note([])
    const whole = value([])
    space()
    if (at < text.length) throw broken("unexpected text after the end")
    return { value: whole, places, repeated }
  }

  return { NotJson, keyOf, parse }
})()
