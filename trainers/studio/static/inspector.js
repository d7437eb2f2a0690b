// Everything about the selected node.

import { html, useState } from "/static/vendor/vendor.js";
import { Loading, Notice, Verdict, count, flat, gist, kindName, num, plural, useAsk } from "/static/base.js";
import { signedClass } from "/static/colour.js";
import { ForkTab } from "/static/fork.js";
import { TokensTab } from "/static/tokens.js";

export const TABS = { turn: "Turn", tokens: "Tokens", siblings: "Siblings", credit: "Credit", fork: "Fork" };

export function Inspector({ place, tree, node, byId, rules, fork, go, wide, setWide, onClose }) {
  const tab = TABS[place.tab] ? place.tab : "turn";
  const shown = { ...place, step: tree.step, tree: tree.summary.index };
  const parent = byId.get(node.parent);
  const siblings = parent ? parent.children : [node];
  const at = siblings.findIndex((item) => item.id === node.id);
  const root = node.parent === null;
  const to = (id) => id && go({ node: id });
  const body = {
    turn: () => html`<${TurnTab} node=${node} go=${go} byId=${byId} />`,
    tokens: () => html`<${TokensTab} place=${shown} node=${node} />`,
    siblings: () => html`<${SiblingsTab} node=${node} siblings=${siblings} go=${go} />`,
    credit: () => html`<${CreditTab} place=${shown} rules=${rules} node=${node} byId=${byId} go=${go} />`,
    fork: () => html`<${ForkTab} place=${shown} node=${node} enabled=${fork} />`,
  };
  return html`<aside class=${`inspector ${wide ? "wide" : ""}`} aria-label="Selected node">
    <header>
      <div class="row"><span class="path figure">${root ? "root" : node.id}</span>
        <span class=${`kind ${node.kind === "invalid" ? "invalid" : ""}`}>${root ? "prompt" : kindName(node.kind)}</span><${Verdict} node=${node} />
        <span class="push"></span>
        <button class="icon" title="Parent" aria-label="Parent" disabled=${root} onClick=${() => to(node.parent)}>←</button>
        <button class="icon" title="Sibling above" aria-label="Sibling above" disabled=${at <= 0} onClick=${() => to(siblings[at - 1]?.id)}>↑</button>
        <button class="icon" title="Sibling below" aria-label="Sibling below" disabled=${at >= siblings.length - 1} onClick=${() => to(siblings[at + 1]?.id)}>↓</button>
        <button class="icon" title=${wide ? "Narrower  w" : "Wider  w"} aria-label="Width" aria-pressed=${wide} onClick=${() => setWide(!wide)}>⇔</button>
        <button class="icon" title="Close  Esc" aria-label="Close" onClick=${onClose}>×</button></div>
      <div class="tabs" role="tablist">${Object.entries(TABS).map(([name, text], i) => html`<button role="tab" aria-selected=${name === tab}
        title=${`${text}  ${i + 1}`} onClick=${() => go({ tab: name === "turn" ? undefined : name }, { replace: true })}>${text}</button>`)}</div>
    </header>
    <div class="body" role="tabpanel" key=${`${shown.step}/${shown.tree}/${node.id}/${tab}`}>${body[tab]()}</div>
  </aside>`;
}

// One turn ------------------------------------------------------------------------------------------------------------

export function Block({ name, text, kind = "" }) {
  if (!text || !text.trim()) return null;
  return html`<section class=${`block ${kind}`}><h3>${name}</h3><pre dir="auto">${text}</pre></section>`;
}

export function Retrieved({ items }) {
  if (!items.length) return null;
  return html`<section class="block"><h3>Retrieved</h3><ol class="retrieved">${items.map((item) => html`<li dir="auto">${item.title || item.id}
    ${item.title && item.id ? html` <code class="soft">${item.id}</code>` : ""}</li>`)}</ol></section>`;
}

export function Pairs({ rows }) {
  const known = rows.filter(([, value]) => value !== null && value !== undefined && value !== "");
  if (!known.length) return null;
  return html`<dl class="pairs">${known.map(([name, value]) => html`<dt>${name}</dt><dd>${value}</dd>`)}</dl>`;
}

function TurnTab({ node, go, byId }) {
  if (node.parent === null) {
    return html`<${Block} name="Prompt" text=${node.observation} />
      <${Pairs} rows=${[["leaves", count(node.leaves)], ["mean reward", num(node.mean)], ["prompt tokens", count(node.context)]]} />`;
  }
  const whole = !(node.argument && node.thought) || (!node.text.includes(node.argument) && node.argument);
  return html`<${Why} node=${node} go=${go} byId=${byId} />
    <${Block} name="Thought" text=${node.thought} />
    <${Block} name=${node.kind === "invalid" ? "No action" : `Action · ${kindName(node.kind)}`} text=${node.argument} kind="action" />
    ${whole && flat(node.text) !== flat(node.thought) && html`<${Block} name="Whole turn" text=${node.text} />`}
    <${Retrieved} items=${node.retrieved} />
    <${Block} name="Observation" text=${node.observation} kind="observation" />
    <section class="block"><h3>Numbers</h3><${Numbers} node=${node} /></section>
    <${Info} info=${node.info} />`;
}

function Why({ node, go, byId }) {
  if (node.picked === null && node.score === null && !node.reason) return null;
  const picked = byId.get(node.picked);
  return html`<section class="why"><h3>Why it was grown</h3><p>
    ${picked && html`The rule picked <button class="link" onClick=${() => go({ node: picked.id })}>${picked.parent === null ? "the prompt" : picked.id}</button>`}
    ${node.score !== null && html` with score <b class="figure">${num(node.score, { digits: 4 })}</b>`}${picked || node.score !== null ? "." : ""}
    ${node.reason && html` <span class="soft">${node.reason}</span>`}</p></section>`;
}

function Numbers({ node }) {
  const leaves = node.advantages.map(([, value]) => value).filter((value) => value !== null);
  const spread = leaves.length > 1 ? ` (${num(Math.min(...leaves), { plus: true })} to ${num(Math.max(...leaves), { plus: true })})` : "";
  return html`<${Pairs} rows=${[
    ["status", node.status + (node.pruned ? ", pruned" : "")],
    ["reward", node.reward === null ? null : num(node.reward, { digits: 4 })],
    ["reward of this turn", node.step_reward ? num(node.step_reward, { digits: 4 }) : null],
    ["mean reward below", node.children.length && node.mean !== null ? `${num(node.mean, { digits: 4 })} over ${plural(node.scored, "leaf", "leaves")}` : null],
    ["advantage", node.advantage === null ? null : `${num(node.advantage, { digits: 4, plus: true })} over ${plural(leaves.length, "leaf", "leaves")}${spread}`],
    ["entropy", node.entropy === null ? null : `${num(node.entropy, { digits: 4 })} nats a token`],
    ["sampled tokens", count(node.tokens)],
    ["observation tokens", count(node.context)],
    ["weights", `version ${node.version}`],
    ["branching", node.branchable ? null : "not possible here"],
  ]} />`;
}

function Info({ info }) {
  const rows = Object.entries(info).map(([name, value]) => [name.replaceAll("_", " "), typeof value === "string" ? value : JSON.stringify(value)]);
  if (!rows.length) return null;
  return html`<details class="block"><summary><h3>From the environment</h3></summary><${Pairs} rows=${rows} /></details>`;
}

// Siblings ------------------------------------------------------------------------------------------------------------

/** One column a text: siblings that wrote the same and saw the same stand together. */
function SiblingsTab({ node, siblings, go }) {
  if (siblings.length < 2) return html`<${Notice} title="No siblings">Only one turn was sampled after this context.</${Notice}>`;
  const largest = Math.max(0, ...siblings.map((item) => Math.abs(item.advantage ?? 0)));
  const columns = new Map();
  for (const item of siblings) {
    const key = JSON.stringify([item.text, item.observation, item.status === "failed"]);
    columns.set(key, [...(columns.get(key) ?? []), item]);
  }
  return html`<p class="soft small">${plural(siblings.length, "turn")} after the same context, ${plural(columns.size, "different one")}.</p>
    <div class="columns">${[...columns.values()].map((same) => html`<${Column} key=${same[0].id} same=${same} node=${node} largest=${largest} go=${go} />`)}</div>`;
}

function Column({ same, node, largest, go }) {
  const [item] = same;
  const here = same.some((other) => other.id === node.id);
  const reasons = [...new Set(same.map((other) => other.reason).filter(Boolean))];
  return html`<article class=${`column ${signedClass(item.advantage, largest)} ${here ? "selected" : ""}`}>
    <header class="row"><span class="kind">${kindName(item.kind)}</span><span class="push"></span>${same.length > 1 ? html`<span class="soft">${same.length} times</span>` : html`<${Verdict} node=${item} />`}</header>
    <table class="small"><thead><tr><th>node</th><th title="mean advantage over leaves">A</th><th title="entropy, nats a token">H</th><th title="mean reward of the leaves below">reward</th></tr></thead>
      <tbody>${same.map((other) => html`<tr key=${other.id} class=${other.id === node.id ? "on" : ""}><td><button class="link figure" onClick=${() => go({ node: other.id })}>${other.id}</button></td>
        <td>${num(other.advantage, { plus: true })}</td><td>${num(other.entropy)}</td><td>${num(other.mean)}</td></tr>`)}</tbody></table>
    ${reasons.map((reason) => html`<p class="soft small">${reason}</p>`)}
    <${Block} name="Thought" text=${item.thought} /><${Block} name="Action" text=${item.argument} kind="action" />
    ${!item.thought && !item.argument && html`<${Block} name="Turn" text=${item.text} />`}
    <${Block} name="Observation" text=${item.observation} kind="observation" /></article>`;
}

// Credit --------------------------------------------------------------------------------------------------------------

function CreditTab({ place, rules, node, byId, go }) {
  const [rule, setRule] = useState("");
  const { data, error } = useAsk("explain", { run: place.run, step: place.step, index: place.tree, credit: rule || undefined });
  const rows = node.advantages.filter(([, value]) => value !== null);
  const largest = Math.max(0, ...[...byId.values()].flatMap((item) => item.advantages.map(([, value]) => Math.abs(value ?? 0))));
  return html`${rows.length > 0 && html`<section class="block"><h3>Advantage of this turn in each trajectory</h3>
      <div class="bars">${rows.map(([leaf, value]) => html`<button key=${leaf} class="bar-row" onClick=${() => go({ node: leaf })} title=${gist(byId.get(leaf) ?? node)}>
        <span class="figure">${leaf}</span><span class="soft figure">r ${num(byId.get(leaf)?.reward)}</span>
        <span class="track"><i class=${signedClass(value, largest)} style=${{ width: `${largest ? (50 * Math.abs(value)) / largest : 0}%`, [value < 0 ? "right" : "left"]: "50%" }}></i></span>
        <span class="figure">${num(value, { plus: true })}</span></button>`)}</div></section>`}
    <section class="block"><div class="row"><h3>How it was computed</h3><span class="push"></span>
      <select aria-label="Credit rule" value=${rule} onChange=${(event) => setRule(event.target.value)}><option value="">the run's own rule</option>
        ${rules.map((name) => html`<option value=${name}>${name}</option>`)}</select></div>
      ${error ? html`<${Notice} kind="error" title="The rule does not explain these trees">${error}</${Notice}>`
        : data ? html`<pre class="arithmetic">${data.text}</pre>` : html`<${Loading} what="Computing" />`}</section>`;
}
