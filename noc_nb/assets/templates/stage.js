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
const find = event => event.target.closest && event.target.closest('.word, .region');
element.addEventListener('mouseover', event => { if (!pinned) show(find(event)); });
element.addEventListener('focusin', event => { if (!pinned) show(find(event)); });
element.addEventListener('mouseleave', () => { if (!pinned) clear(); });
element.addEventListener('click', event => {
  const target = find(event);
  pinned = target && target !== pinned ? target : null;
  show(pinned || target);
});
element.addEventListener('keydown', event => {
  if (event.key === 'Enter' && find(event)) find(event).dispatchEvent(new Event('click', {bubbles: true}));
});
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
  if (Math.abs(box[0] - box[2]) > .02 && Math.abs(box[1] - box[3]) > .02) trigger('select', {box});
});
