// Colours of numbers. Both scales run between blue and orange, which all common kinds of colour blindness tell apart.

const STEPS = 4;

/** p1…p4, n1…n4 or z: the class of a signed number relative to the largest. */
export function signedClass(value, largest) {
  if (value === null || value === undefined || !largest || value === 0) return "z";
  const level = Math.max(1, Math.ceil(STEPS * Math.min(1, Math.abs(value) / largest)));
  return `${value > 0 ? "p" : "n"}${level}`;
}

/** s0…s6: the class of a number between two ends. */
export function rampClass(value, low, high) {
  if (value === null || value === undefined || !(high > low)) return "s0";
  return `s${Math.round(6 * Math.min(1, Math.max(0, (value - low) / (high - low))))}`;
}

export const NODE_COLOURS = {
  advantage: "Advantage",
  reward: "Reward",
  entropy: "Entropy",
  score: "Expansion score",
};

/** node -> class, and what the legend says: {of, low, high, signed}. */
export function nodeScale(nodes, by) {
  const values = nodes.map((node) => node[by]).filter((value) => value !== null && value !== undefined);
  if (by === "advantage") {
    const largest = Math.max(0, ...values.map(Math.abs));
    return { of: (node) => signedClass(node.advantage, largest), low: -largest, high: largest, signed: true, any: values.length > 0 };
  }
  const low = Math.min(0, ...values);
  const high = Math.max(...values, low);
  const of = by === "reward"
    ? (node) => (node.status === "open" ? rampClass(node.mean, low, high) : rampClass(node.reward, low, high))
    : (node) => rampClass(node[by], low, high);
  return { of, low, high, signed: false, any: values.length > 0 };
}

export const TOKEN_COLOURS = {
  logprob: { name: "Log-prob", unit: "nats", about: "log-probability of the sampled token; strong colour: the model was surprised" },
  entropy: { name: "Entropy", unit: "nats", about: "entropy of the distribution that the token was drawn from" },
  value: { name: "Value", unit: "", about: "what the value head expected before the token" },
  advantage: { name: "Advantage", unit: "", about: "advantage of the token, or of its turn where the rule credits turns" },
};

/** number -> class for the tokens of a turn. */
export function tokenScale(name, values) {
  const known = values.filter((value) => value !== null && value !== undefined);
  if (name === "advantage" || name === "value") {
    const largest = Math.max(0, ...known.map(Math.abs));
    return { of: (value) => signedClass(value, largest), low: -largest, high: largest, signed: true };
  }
  if (name === "logprob") {
    const low = Math.min(-1, ...known);
    return { of: (value) => rampClass(-value, 0, -low), low, high: 0, signed: false, reversed: true };
  }
  const high = Math.max(0.5, ...known);
  return { of: (value) => rampClass(value, 0, high), low: 0, high, signed: false };
}
