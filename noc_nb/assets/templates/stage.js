let pinned = null;
const all = query => [...element.querySelectorAll(query)];
const looks = word => JSON.parse(word.dataset.looks);
function clear() {
  all('.region, .tag').forEach(r => { r.style.opacity = ''; r.style.fillOpacity = ''; });
  all('.word').forEach(w => { w.style.background = ''; w.classList.remove('on'); });
}
function show(target) {
  clear();
  if (!target) return;
  if (target.matches('.word')) {
    const weights = looks(target), top = Math.max(...weights, 1e-9);
    target.classList.add('on');
    all('.region, .tag').forEach(r => {
      const share = weights[+r.dataset.n] / top;
      if (r.matches('.region')) r.style.fillOpacity = .28 * share;
      r.style.opacity = .25 + .75 * share;
    });
  } else all('section').forEach(section => {
    const words = [...section.querySelectorAll('.word')], mine = words.map(w => looks(w)[+target.dataset.n]);
    const top = Math.max(...mine, 1e-9);
    words.forEach((w, i) => w.style.background = `rgba(0, 114, 178, ${.5 * mine[i] / top})`);
  });
}
const find = event => event.target.closest && event.target.closest('#stage :is(.word, .region)');
element.addEventListener('mouseover', event => { if (!pinned) show(find(event)); });
element.addEventListener('focusin', event => { if (!pinned) show(find(event)); });
element.addEventListener('mouseleave', () => { if (!pinned) clear(); });
element.addEventListener('click', event => {
  const target = find(event);
  pinned = target && target !== pinned ? target : null;
  show(pinned || target);
});
element.addEventListener('keydown', event => {   // one stop of Tab for a caption: arrows go from word to word
  const word = event.target.closest('.word');
  if (!word) return;
  if (event.key === 'Enter') word.click();
  const next = {ArrowRight: word.nextElementSibling, ArrowLeft: word.previousElementSibling}[event.key];
  if (!next) return;
  word.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
});
const act = (name, ...values) => trigger('select', {do: name, values});
const field = id => document.getElementById(id);
const asked = (event, kind) => event.target.closest && event.target.closest(`.noc ${kind}[data-do]`);
const acts = {
  follow: () => act('follow'), undo: () => act('undo'), example: b => act('example', +b.dataset.n),
  copy: b => navigator.clipboard.writeText(b.parentElement.nextElementSibling.textContent),
  tick: box => act('tick', box.dataset.name, box.checked), phrase: box => act('phrase', box.checked),
  weigh: radio => act('weigh', radio.value), say: () => { said = true; act('say', field('line').value); },
  box: () => act('box', field('name').value, field('typed').value.split(/[,;\s]+/).filter(x => x).map(x => x / 100)),
};
let soon = null, last = null, said = false;
const open = new Set(), turns = {};
addEventListener('click', event => { const b = asked(event, 'button'); if (b) acts[b.dataset.do](b); });
addEventListener('change', event => {
  const input = asked(event, 'input');
  if (input && input.type !== 'range') acts[input.dataset.do](input);
});
addEventListener('input', event => {
  const range = asked(event, '[type=range]');
  if (!range) return;
  range.parentElement.querySelector('output').value = (+range.value).toFixed(1);
  clearTimeout(soon);
  soon = setTimeout(() => act('price', range.dataset.name, +range.value), 150);
});
addEventListener('submit', event => {
  const form = asked(event, 'form');
  if (!form) return;
  event.preventDefault();
  acts[form.dataset.do]();
}, true);
addEventListener('focusin', event => last = event.target.id || null);
addEventListener('pointerdown', event => last = event.target.id || null);
addEventListener('toggle', event => {
  if (event.target.isConnected) open[event.target.open ? 'add' : 'delete'](event.target.id);
}, true);
function fresh(part) {                           // an answer of the server, whose number is the turn
  const turn = part.querySelector('[data-turn]')?.dataset.turn;
  if (!turn || turn === turns[part.id]) return;
  turns[part.id] = turn;
  part.querySelectorAll('input').forEach(i => {    // Gradio keeps what the visitor set, even after an error
    i.checked = i.hasAttribute('checked');
    if (i.type === 'range') i.value = i.getAttribute('value');
  });
  part.querySelectorAll('details').forEach(d => d.open = open.has(d.id));
  if (last && document.activeElement === document.body) field(last)?.focus();
  if (part !== element) return;
  if (said && !element.querySelector('[data-wrong]')) field('line').value = '';
  said = false;
  pinned = null;
}
for (const part of [element, field('panel')])
  new MutationObserver(() => fresh(part)).observe(part, {childList: true, subtree: true, attributeFilter: ['data-turn']});
const bare = () => document.querySelectorAll('#upload [aria-label]').forEach(b => b.removeAttribute('aria-label'));
new MutationObserver(bare).observe(document.body, {subtree: true, childList: true, attributeFilter: ['aria-label']});
let from = null;                                 // where a box begins that is being drawn
function place(event) {                          // in shares of the picture
  const svg = element.querySelector('svg'), {width, height} = svg.viewBox.baseVal;
  const {x, y} = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
  return [x / width, y / height].map(share => Math.min(1, Math.max(0, share)));
}
element.addEventListener('pointerdown', event => {
  if (event.pointerType === 'touch' || !event.target.closest('svg')) return;
  from = place(event);
  event.preventDefault();
});
addEventListener('pointermove', event => {
  if (!from) return;
  const svg = element.querySelector('svg'), {width, height} = svg.viewBox.baseVal, to = place(event);
  const line = svg.querySelector('.drawn') || svg.appendChild(document.createElementNS(svg.namespaceURI, 'path'));
  line.setAttribute('class', 'drawn');
  const [left, right] = [from[0], to[0]].map(x => x * width), [top, bottom] = [from[1], to[1]].map(y => y * height);
  line.setAttribute('d', `M${left} ${top}H${right}V${bottom}H${left}Z`);
});
addEventListener('pointerup', event => {
  if (!from) return;
  const box = [...from, ...place(event)];
  from = null;
  if (Math.abs(box[0] - box[2]) > .02 && Math.abs(box[1] - box[3]) > .02) act('box', field('name').value, box);
});
