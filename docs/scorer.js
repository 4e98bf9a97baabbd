// Sphinx's weights, and more for a page whose own title has the words that are looked for; the reference comes later.
var wanted = (new URLSearchParams(location.search).get("q") || "").toLowerCase().split(/\s+/).filter(Boolean);
var Scorer = {
  score: ([page, title, , , score]) => score - (page.startsWith("api/") ? 20 : 0)
    + (page === "index" && wanted.some(word => /^(install|start|pip|setup)/.test(word)) ? 100 : 0)
    + 20 * wanted.filter(word => title.toLowerCase().includes(word)).length,
  objNameMatch: 11, objPartialMatch: 6, objPrio: {0: 15, 1: 5, 2: -5}, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};
