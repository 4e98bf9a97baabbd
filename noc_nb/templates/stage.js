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
