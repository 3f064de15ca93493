// Python's ways with values, for the page that checks a configuration: its messages are to be those of the engine.
// Whole numbers are BigInt, fractions are Number, objects are Map. Everything is in `zeroPython`.

const zeroPython = (() => {
  "use strict"
  const isNumber = (value) => ["bigint", "number", "boolean"].includes(typeof value)
  const plain = (value) => (typeof value === "boolean" ? Number(value) : value)

  // ==, for what JSON can hold.
  function same(one, other) {
    if (isNumber(one) && isNumber(other)) return plain(one) == plain(other) // eslint-disable-line eqeqeq
    if (Array.isArray(one) && Array.isArray(other)) {
      return one.length === other.length && one.every((each, place) => same(each, other[place]))
    }
    if (one instanceof Map && other instanceof Map) {
      return one.size === other.size && [...one].every(([key, value]) => other.has(key) && same(value, other.get(key)))
    }
    return one === other
  }

  const has = (inside, item) => (inside instanceof Map ? inside.has(item) : inside.some((each) => same(each, item)))

  // A fraction with as few digits as give it back, as repr writes it.
  function fraction(value) {
    if (Number.isNaN(value)) return "NaN"
    if (!Number.isFinite(value)) return value > 0 ? "Infinity" : "-Infinity"
    if (value === 0) return Object.is(value, -0) ? "-0.0" : "0.0"
    const sign = value < 0 ? "-" : ""
    const [mantissa, power] = Math.abs(value).toExponential().split("e")
    const digits = mantissa.replace(".", ""), exponent = Number(power)
    if (exponent < -4 || exponent >= 16) {
      const rest = digits.length > 1 ? `.${digits.slice(1)}` : ""
      return `${sign}${digits[0]}${rest}e${exponent < 0 ? "-" : "+"}${String(Math.abs(exponent)).padStart(2, "0")}`
    }
    if (exponent < 0) return `${sign}0.${"0".repeat(-exponent - 1)}${digits}`
    const whole = digits.slice(0, exponent + 1).padEnd(exponent + 1, "0")
    return `${sign}${whole}.${digits.slice(exponent + 1) || "0"}`
  }

  // json.dumps.
  function dumps(value) {
    if (typeof value === "bigint") return String(value)
    if (typeof value === "number") return fraction(value)
    if (Array.isArray(value)) return `[${value.map(dumps).join(", ")}]`
    if (value instanceof Map) return `{${[...value].map(([key, each]) => `${dumps(key)}: ${dumps(each)}`).join(", ")}}`
    const code = (sign) => `\\u${sign.charCodeAt(0).toString(16).padStart(4, "0")}`
    return JSON.stringify(value).replace(/[^ -~]/g, code)
  }

  // As messages show a value: on one line, and cut where nobody reads on.
  function shown(value) {
    const text = dumps(value).trim().split(/\s+/).join(" "), wide = Number(zeroConfig.wide)
    return text.length <= wide ? text : `${text.slice(0, wide - 3)}...`
  }

  // str, for what the rules put into their texts.
  const str = (value) => (typeof value === "string" ? value : dumps(value))

  // difflib.get_close_matches with n = 1, and SequenceMatcher.ratio.
  function nearest(word, possible) {
    const scored = possible.map((each) => [ratio([...each], [...word]), each]).filter(([score]) => score >= 0.6)
    scored.sort((one, other) => other[0] - one[0] || (one[1] < other[1] ? 1 : -1))
    return scored.length ? scored[0][1] : ""
  }

  function ratio(one, other) {
    const length = one.length + other.length
    return length ? (2 * matching(one, other, 0, one.length, 0, other.length)) / length : 1
  }

  // Signs in the longest common piece, and in those to its left and right.
  function matching(one, other, from, to, start, end) {
    let best = 0, at = from, there = start, lengths = new Map()
    for (let i = from; i < to; i++) {
      const next = new Map()
      for (let j = start; j < end; j++) {
        if (one[i] !== other[j]) continue
        const length = (lengths.get(j - 1) || 0) + 1
        next.set(j, length)
        if (length > best) [best, at, there] = [length, i - length + 1, j - length + 1]
      }
      lengths = next
    }
    if (!best) return 0
    const left = matching(one, other, from, at, start, there)
    return left + best + matching(one, other, at + best, to, there + best, end)
  }

  return { dumps, fraction, has, nearest, same, shown, str }
})()
