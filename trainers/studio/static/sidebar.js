// What there is: runs, steps, and the trees of a step with filters.

import { html, useMemo } from "/static/vendor/vendor.js";
import { Loading, Notice, count, num, plural, useStored } from "/static/base.js";

export function Sidebar({ runs, unreadable, run, steps, live, step, trees, failure, index, go, follow, setFollow }) {
  return html`<aside class="sidebar" aria-label="Runs, steps and trees">
    <${RunChoice} runs=${runs} unreadable=${unreadable} run=${run} live=${live} go=${go} />
    <${Steps} steps=${steps} step=${step} go=${go} live=${live} follow=${follow} setFollow=${setFollow} />
    <${Trees} key=${run} trees=${trees} failure=${failure} index=${index} step=${step} go=${go} />
  </aside>`;
}

function RunChoice({ runs, unreadable, run, live, go }) {
  const about = runs.find((item) => item.id === run);
  const facts = about ? [about.algorithm, about.model, about.seed === null || about.seed === undefined ? null : `seed ${about.seed}`] : [];
  return html`<section class="runs">
    ${runs.length > 1
      ? html`<label class="field"><span class="key">Run</span><select value=${run} onChange=${(event) => go({ run: event.target.value,
          step: undefined, tree: undefined, node: undefined, vstep: undefined, vtree: undefined })}>
          ${runs.map((item) => html`<option key=${item.id} value=${item.id}>${item.id}${item.live ? " · training" : ""}</option>`)}
        </select></label>`
      : html`<h2 title=${run}>${run}</h2>`}
    <p class="facts"><span class=${`state ${live ? "live" : ""}`}>${live ? "training" : "at rest"}</span>
      ${facts.filter(Boolean).map((fact) => html`<span title=${fact}>${fact}</span>`)}</p>
    ${unreadable.length > 0 && html`<details class="soft small"><summary>${plural(unreadable.length, "folder")} cannot be read</summary>
      <ul>${unreadable.map((item) => html`<li key=${item.id}><b>${item.id}</b> ${item.message}</li>`)}</ul></details>`}
  </section>`;
}

// Steps ---------------------------------------------------------------------------------------------------------------

const CHART = { width: 268, height: 54, pad: 4 };

function Steps({ steps, step, go, live, follow, setFollow }) {
  if (!steps.length) {
    return html`<section><${Notice} title="No trees yet">${live ? "They appear here as soon as the first step is finished."
      : html`The run stored none: it may have trained with <code>trainer.store_sample=0</code>.`}</${Notice}></section>`;
  }
  const at = Math.max(0, steps.findIndex((item) => item.step === step));
  const now = steps[at];
  const to = (place) => {
    const next = steps[Math.min(steps.length - 1, Math.max(0, place))];
    setFollow(false);
    if (next.step !== step) go({ step: next.step, tree: undefined, node: undefined, vstep: undefined, vtree: undefined });
  };
  const metrics = now.metrics;
  return html`<section class="steps">
    <div class="row"><h2>Step <span class="figure">${step}</span></h2>
      <span class="soft small" title="place among the stored steps">${at + 1} of ${count(steps.length)}</span>
      <span class="push"></span>
      <label class="check small soft" title="Go to each new step as it is written"><input type="checkbox" checked=${follow}
        onChange=${(event) => setFollow(event.target.checked)} />follow</label>
      <button class="icon" title="Previous step  [" aria-label="Previous step" disabled=${at === 0} onClick=${() => to(at - 1)}>‹</button>
      <button class="icon" title="Next step  ]" aria-label="Next step" disabled=${at === steps.length - 1} onClick=${() => to(at + 1)}>›</button>
    </div>
    <${Curve} steps=${steps} at=${at} />
    <input type="range" aria-label="Step" min="0" max=${steps.length - 1} value=${at} onInput=${(event) => to(Number(event.target.value))} />
    <dl class="stats"><div title="mean reward of the step's trajectories"><dt>reward</dt><dd>${num(metrics["critic/rewards/mean"], { digits: 3 })}</dd></div>
      <div title="mean entropy of turns, nats"><dt>entropy</dt><dd>${num(metrics["tree/entropy"])}</dd></div>
      <div title="mean number of turns"><dt>turns</dt><dd>${num(metrics["num_turns/mean"])}</dd></div>
      ${Object.entries(metrics).filter(([name]) => /^validation\/(em|f1|success|reward)$/.test(name)).slice(0, 1).map(([name, value]) => html`<div title="on the validation split"><dt>dev ${name.split("/")[1]}</dt><dd>${num(value, { digits: 3 })}</dd></div>`)}</dl>
    ${now.sampled_out > 0 && html`<p class="soft small">${plural(now.sampled_out, "tree")} of this step ${now.sampled_out === 1 ? "was" : "were"} not stored.</p>`}
  </section>`;
}

function Curve({ steps, at }) {
  const points = steps.map((item, i) => [i, item.metrics["critic/rewards/mean"]]).filter(([, y]) => typeof y === "number");
  if (points.length < 2) return null;
  const ys = points.map(([, y]) => y);
  const [low, high] = [Math.min(...ys), Math.max(...ys)];
  const x = (i) => CHART.pad + (i / Math.max(1, steps.length - 1)) * (CHART.width - 2 * CHART.pad);
  const y = (value) => CHART.height - CHART.pad - ((value - low) / (high - low || 1)) * (CHART.height - 2 * CHART.pad);
  const line = points.map(([i, value], n) => `${n ? "L" : "M"}${x(i).toFixed(1)},${y(value).toFixed(1)}`).join("");
  const here = points.find(([i]) => i === at);
  return html`<svg class="curve" viewBox=${`0 0 ${CHART.width} ${CHART.height}`} role="img"
      aria-label=${`Mean reward over steps, from ${num(ys[0])} to ${num(ys.at(-1))}`}>
    <path class="area" d=${`${line}L${x(points.at(-1)[0])},${CHART.height}L${x(points[0][0])},${CHART.height}Z`} />
    <path class="line" d=${line} />
    <line class="now" x1=${x(at)} x2=${x(at)} y1="0" y2=${CHART.height} />
    ${here && html`<circle cx=${x(at)} cy=${y(here[1])} r="3.5" />`}
  </svg>`;
}

// Trees ---------------------------------------------------------------------------------------------------------------

const ORDERS = {
  index: ["As stored", (a, b) => a.index - b.index],
  spread: ["Disagreement", (a, b) => b.spread - a.spread || b.leaves - a.leaves],
  high: ["Reward, high first", (a, b) => (b.mean ?? -Infinity) - (a.mean ?? -Infinity)],
  low: ["Reward, low first", (a, b) => (a.mean ?? Infinity) - (b.mean ?? Infinity)],
  leaves: ["Leaves", (a, b) => b.leaves - a.leaves],
  depth: ["Depth", (a, b) => b.depth - a.depth],
};
const EMPTY = { text: "", low: "", high: "", depth: "", mixed: false, failed: false, order: "index" };

/** Most telling first: rewards that differ, then the most leaves. */
export function mostTelling(trees) {
  return trees.reduce((best, tree) => (best === null || (tree.spread > 0) - (best.spread > 0) > 0
    || ((tree.spread > 0) === (best.spread > 0) && tree.leaves > best.leaves) ? tree : best), null);
}

export function filterTrees(trees, filters) {
  const wanted = filters.text.trim().toLowerCase();
  const [low, high, depth] = [filters.low, filters.high, filters.depth].map((text) => (text === "" ? null : Number(text)));
  const keep = (tree) => (!wanted || tree.question.toLowerCase().includes(wanted))
    && (low === null || (tree.mean !== null && tree.mean >= low))
    && (high === null || (tree.mean !== null && tree.mean <= high))
    && (depth === null || tree.depth >= depth)
    && (!filters.mixed || tree.spread > 0)
    && (!filters.failed || tree.failed > 0);
  return trees.filter(keep).sort(ORDERS[filters.order][1]);
}

function Trees({ trees, failure, index, step, go }) {
  const [filters, setFilters] = useStored("filters", EMPTY);
  const known = { ...EMPTY, ...filters };
  const shown = useMemo(() => filterTrees(trees ?? [], known), [trees, filters]);
  const set = (change) => setFilters({ ...known, ...change });
  const narrowed = Object.keys(EMPTY).some((name) => name !== "order" && known[name] !== EMPTY[name]);
  return html`<section class="trees">
    <div class="row"><h2>Trees</h2><span class="soft">${trees ? (narrowed ? `${count(shown.length)} of ${count(trees.length)}` : count(trees.length)) : ""}</span>
      <span class="push"></span>
      ${narrowed && html`<button class="link" onClick=${() => setFilters({ ...EMPTY, order: known.order })}>clear filters</button>`}</div>
    <div class="filters">
      <input class="wide" type="search" placeholder="Filter questions" aria-label="Filter questions" value=${known.text}
        onInput=${(event) => set({ text: event.target.value })} />
      <label><span>reward</span><input type="number" step="0.1" placeholder="min" aria-label="Least mean reward" value=${known.low}
        onInput=${(event) => set({ low: event.target.value })} /><i>to</i><input type="number" step="0.1" placeholder="max"
        aria-label="Greatest mean reward" value=${known.high} onInput=${(event) => set({ high: event.target.value })} /></label>
      <label><span>depth ≥</span><input type="number" min="0" step="1" aria-label="Least depth" value=${known.depth}
        onInput=${(event) => set({ depth: event.target.value })} /></label>
      <div class="chips"><button class="chip" aria-pressed=${known.mixed} onClick=${() => set({ mixed: !known.mixed })}
          title="Trees whose trajectories got different rewards">disagree</button>
        <button class="chip" aria-pressed=${known.failed} onClick=${() => set({ failed: !known.failed })}
          title="Trees with trajectories that failed for outside reasons">failed</button>
        <select aria-label="Order" value=${known.order} onChange=${(event) => set({ order: event.target.value })}>
          ${Object.entries(ORDERS).map(([name, [text]]) => html`<option value=${name}>${text}</option>`)}</select></div>
    </div>
    ${failure ? html`<${Notice} kind="error" title="This step cannot be shown">${failure}</${Notice}>`
      : !trees ? html`<${Loading} what="Reading trees" />`
      : !trees.length ? html`<${Notice} title="No trees in this step" />`
      : !shown.length ? html`<${Notice} title="No tree passes these filters" />`
      : html`<ul class="list" role="listbox" aria-label="Trees of the step">${shown.map((tree) => html`<${Row} key=${tree.index} tree=${tree}
          selected=${tree.index === index} step=${step} go=${go} />`)}</ul>`}
  </section>`;
}

function Row({ tree, selected, step, go }) {
  const open = () => go({ step, tree: tree.index, node: undefined, side: undefined, vstep: undefined, vtree: undefined });
  return html`<li role="option" aria-selected=${selected} class=${selected ? "selected" : ""}>
    <button onClick=${open} data-tree=${tree.index}>
      <span class="question" dir="auto">${tree.question || "(no text)"}</span>
      <span class="row small"><b class="figure">${num(tree.mean)}</b><${Share} tree=${tree} />
        <span class="soft push">${tree.failed ? `${tree.failed} failed · ` : ""}${plural(tree.leaves, "leaf", "leaves")} · depth ${tree.depth}</span></span>
    </button></li>`;
}

/** The rewards of a tree's leaves as one bar: right, partly right, wrong, failed. */
export function Share({ tree }) {
  const top = Math.max(1, tree.best ?? 0);
  const parts = { good: 0, part: 0, bad: 0, failed: 0 };
  for (const reward of tree.rewards) {
    parts[reward === null ? "failed" : reward <= 0 ? "bad" : reward >= top ? "good" : "part"] += 1;
  }
  const words = `${parts.good} right, ${parts.part} partly, ${parts.bad} wrong, ${parts.failed} without reward`;
  return html`<span class="share" role="img" aria-label=${words} title=${words}>
    ${Object.entries(parts).filter(([, n]) => n).map(([name, n]) => html`<i class=${name} style=${{ flexGrow: n }}></i>`)}</span>`;
}
