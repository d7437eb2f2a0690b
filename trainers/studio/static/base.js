// What every part of the page shares: the place in the URL, requests, numbers and words.

import { html, useCallback, useEffect, useRef, useState } from "/static/vendor/vendor.js";

// The place -----------------------------------------------------------------------------------------------------------

const NUMBERS = ["step", "tree", "vstep", "vtree"];

/** The place that the URL names: {run, step, tree, node, tab, colour, vstep, vtree, side}; absent where it does not. */
export const readPlace = () => placeOf(location.hash);

function placeOf(hash) {
  const query = hash.replace(/^#\/?\??/, "");
  const place = {};
  for (const [name, value] of new URLSearchParams(query)) {
    place[name] = NUMBERS.includes(name) ? Math.max(0, parseInt(value, 10) || 0) : value;
  }
  return place;
}

export function linkTo(place) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(place)) {
    if (value !== undefined && value !== null && value !== "") query.set(name, value);
  }
  return `#/?${query}`;
}

const SETTLE_MS = 120;

/**
 * [place, go]: go({node: "0.1"}) changes parts of it; `{replace: true}` leaves no step in the browser's history.
 *
 * The page follows at once; the address follows when it settles, since browsers refuse to write it at the pace of a
 * held arrow key.
 */
export function usePlace() {
  const [place, setPlace] = useState(readPlace);
  const now = useRef(place);
  const writing = useRef({ timer: 0, push: false });
  useEffect(() => {
    const read = () => {
      clearTimeout(writing.current.timer);
      now.current = readPlace();
      setPlace(now.current);
    };
    addEventListener("hashchange", read);
    addEventListener("popstate", read);
    return () => {
      removeEventListener("hashchange", read);
      removeEventListener("popstate", read);
    };
  }, []);
  const go = useCallback((change, { replace = false } = {}) => {
    const link = linkTo({ ...now.current, ...change });
    if (link === linkTo(now.current)) return;
    now.current = placeOf(link);
    setPlace(now.current);
    clearTimeout(writing.current.timer);
    writing.current.push ||= !replace;
    writing.current.timer = setTimeout(() => {
      history[writing.current.push ? "pushState" : "replaceState"](null, "", link);
      writing.current.push = false;
    }, SETTLE_MS);
  }, []);
  return [place, go];
}

// Requests ------------------------------------------------------------------------------------------------------------

export async function ask(path, params = {}, { body, signal } = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    if (value !== undefined && value !== null) query.set(name, value);
  }
  const url = `/api/${path}${query.size ? `?${query}` : ""}`;
  const options = body === undefined
    ? { signal }
    : { signal, method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) };
  let answer;
  try {
    answer = await fetch(url, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The studio does not answer. Is `turntree view` still running?");
  }
  const value = await answer.json().catch(() => ({ message: `HTTP ${answer.status}` }));
  if (!answer.ok) throw new Error(value.message || `HTTP ${answer.status}`);
  return value;
}

/** {data, error, loading} of a GET; asked again when its parameters change, or `refresh` does. `params` null: nothing. */
export function useAsk(path, params, refresh = 0) {
  const key = params === null ? null : `${path} ${JSON.stringify(params)}`;
  const [state, setState] = useState({ key: null });
  useEffect(() => {
    if (key === null) return undefined;
    const stop = new AbortController();
    ask(path, params, { signal: stop.signal }).then(
      (data) => {
        // An answer that says nothing new (polling) draws nothing anew.
        const text = JSON.stringify(data);
        setState((old) => (old.key === key && old.text === text ? old : { key, data, text }));
      },
      (error) => error.name === "AbortError" || setState({ key, error: error.message }),
    );
    return () => stop.abort();
  }, [key, refresh]);
  if (key === null) return { data: undefined, error: undefined, loading: false };
  // Another question's answer is never shown for this one.
  if (state.key !== key) return { data: undefined, error: undefined, loading: true };
  return { data: state.data, error: state.error, loading: false };
}

/** Counts up every `ms` while the page is visible. */
export function useTicks(ms) {
  const [tick, setTick] = useState(0);
  useEffect(() => {
    const timer = setInterval(() => document.hidden || setTick((n) => n + 1), ms);
    return () => clearInterval(timer);
  }, [ms]);
  return tick;
}

export function useStored(name, initial) {
  const [value, setValue] = useState(() => {
    try {
      const kept = localStorage.getItem(`turntree.${name}`);
      return kept === null ? initial : JSON.parse(kept);
    } catch {
      return initial;
    }
  });
  const set = useCallback((next) => {
    setValue(next);
    try {
      localStorage.setItem(`turntree.${name}`, JSON.stringify(next));
    } catch {
      // A browser that keeps nothing shows the same page.
    }
  }, [name]);
  return [value, set];
}

export function useLatest(value) {
  const ref = useRef(value);
  ref.current = value;
  return ref;
}

// Numbers and words ---------------------------------------------------------------------------------------------------

export function num(value, { digits = 2, plus = false } = {}) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  let text = value.toFixed(digits);
  if (Number(text) === 0) text = (0).toFixed(digits);
  else if (plus && value > 0) text = `+${text}`;
  return text.replace("-", "\u2212");
}

export const count = (value) => (value === null || value === undefined ? "–" : value.toLocaleString("en"));
export const plural = (n, one, many = `${one}s`) => `${count(n)} ${n === 1 ? one : many}`;
export const flat = (text) => text.replace(/\s+/g, " ").trim();
const KINDS = { search: "search", answer: "answer", python: "python", invalid: "no action", "": "turn" };
export const kindName = (kind) => KINDS[kind] ?? kind;
/** Signs of actions in a box of 12 x 12, drawn with strokes so that every system shows the same. */
const SIGNS = {
  search: "M5 1.5a3.6 3.6 0 1 1 0 7.2a3.6 3.6 0 1 1 0-7.2M7.7 7.8L10.6 10.7",
  answer: "M6 1.2L10.8 6L6 10.8L1.2 6Z",
  python: "M4.2 2.2L1.2 6L4.2 9.8M7.8 2.2L10.8 6L7.8 9.8",
  invalid: "M6 1.4a4.6 4.6 0 1 1 0 9.2a4.6 4.6 0 1 1 0-9.2M2.8 9.2L9.2 2.8",
  root: "M2 2.5h8M2 6h8M2 9.5h5",
  tool: "M6 1.5v9M1.5 6h9",
};
export const sign = (node) => (node.parent === null ? SIGNS.root : SIGNS[node.kind] ?? SIGNS.tool);
/** What a node says in one line. */
export const gist = (node) => flat(node.parent === null ? node.observation : node.argument || node.thought || node.text);

/** good, bad, failed, cut or null: how a trajectory ended, as colour and mark say it. */
export function outcome(node) {
  if (node.status === "open") return null;
  if (node.status === "failed") return "failed";
  return node.reward !== null && node.reward > 0 ? "good" : "bad";
}

export function verdictText(node) {
  const how = outcome(node);
  if (how === null) return "";
  if (how === "failed") return "failed";
  const mark = how === "good" ? "✓" : "✗";
  const reward = node.reward === null ? "no reward" : num(node.reward);
  return `${node.status === "truncated" ? "cut " : ""}${mark} ${reward}`;
}

export function Verdict({ node }) {
  const how = outcome(node);
  return how && html`<span class=${`verdict ${how}`}>${verdictText(node)}</span>`;
}

export function Notice({ kind = "empty", title, children }) {
  return html`<div class=${`notice ${kind}`} role=${kind === "error" ? "alert" : "status"}>
    <strong>${title}</strong>${children && html`<div>${children}</div>`}</div>`;
}

export const Loading = ({ what = "Loading" }) => html`<div class="loading" role="status"><i></i>${what}…</div>`;
