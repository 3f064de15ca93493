// Replays a recorded step on a machine: the same as lessons/clock.py, which a test compares.
// A classic script and not a module: Chromium loads no modules from file://. Everything is in `zeroReplay`.

const zeroReplay = (() => {
  "use strict"
  const ROUNDS = 60 // of halving, in the search for a number of tokens
  const length = (bars) => bars.reduce((sum, bar) => sum + bar.end - bar.start, 0)

  // The entries of a step: [letter, bytes] is a call, [letter, FLOPs, how many calls ago it waits for] arithmetic.
  function entriesOf({ stage, bucket, ranks, microBatches }) {
    const parts = zeroClock.steps[stage === "2" ? `2/${bucket}` : stage][ranks]
    const made = []
    for (let at = 0; at < microBatches; at++) {
      const name = microBatches === 1 ? "one" : at === 0 ? "first" : at === microBatches - 1 ? "last" : "middle"
      made.push(...(parts[name] || parts.one))
    }
    return [...made, ...parts.update]
  }

  const isCall = (entry) => entry.length === 2

  function seconds(what, sent, ranks, machine) {
    const steps = (ranks - 1) * (what === "all_reduce" ? 2 : 1)
    return machine.latency * steps + sent / machine.bandwidth
  }

  // When everything happens on a rank, in seconds. All ranks do the same.
  function replay(setting, machine, { parameters, tokens }) {
    const scale = parameters / zeroClock.numel, slower = (scale * tokens) / zeroClock.tokens / machine.flops
    const arithmetic = [], network = []
    let now = 0
    for (const entry of entriesOf(setting)) {
      const what = zeroClock.names[entry[0]], last = network.length ? network[network.length - 1].end : 0
      if (isCall(entry)) {
        const start = Math.max(now, last)
        network.push({ what, start, end: start + seconds(what, scale * entry[1], setting.ranks, machine) })
        continue
      }
      const [, flops, ago] = entry
      const start = Math.max(now, ago >= 0 ? network[network.length - ago].end : 0)
      now = start + flops * slower
      if (flops) arithmetic.push({ what, start, end: now })
    }
    return told(arithmetic, network)
  }

  function told(arithmetic, network) {
    const step = Math.max(0, ...[...arithmetic, ...network].map((bar) => bar.end))
    let hidden = 0
    for (const mine of arithmetic) {
      for (const other of network) {
        hidden += Math.max(0, Math.min(mine.end, other.end) - Math.max(mine.start, other.start))
      }
    }
    return { arithmetic, network, step, idle: step - length(arithmetic), sending: length(network), hidden }
  }

  // Tokens from which what leaves early takes no longer than the arithmetic after it, by bandwidth alone.
  function bound(setting, machine) {
    const entries = entriesOf(setting), last = entries.findLastIndex((entry) => !isCall(entry))
    let sent = 0, flops = 0, called = false
    for (const entry of entries.slice(0, last + 1)) {
      if (isCall(entry)) {
        sent += entry[1]
        called = true
      } else if (called) flops += entry[1]
    }
    return flops ? ((sent / (flops / zeroClock.tokens)) * machine.flops) / machine.bandwidth : null
  }

  // Tokens from which the arithmetic stands still as little as it ever will; null if more never help.
  function hidesFrom(setting, machine, parameters) {
    const at = (tokens) => replay(setting, machine, { parameters, tokens })
    const one = at(1), busy = length(one.arithmetic)
    if (!busy || !one.sending) return null
    let low = (1e-6 * one.sending) / busy, high = (1e6 * one.sending) / busy
    const least = at(high).idle + 1e-6 * one.sending
    if (at(low).idle <= least) return null
    for (let round = 0; round < ROUNDS; round++) {
      const middle = Math.sqrt(low * high)
      if (at(middle).idle <= least) high = middle
      else low = middle
    }
    return high
  }

  return { replay, bound, hidesFrom }
})()
