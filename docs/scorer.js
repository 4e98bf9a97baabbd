// Sphinx's weights, and more for the chapter that defines a name and for a title with the words that are looked for;
// the reference comes later. The build writes DEFINED: a name -> the pages that define it.
var wanted = (new URLSearchParams(location.search).get("q") || "").toLowerCase().split(/\s+/).filter(Boolean);
var Scorer = {
  score: ([page, title, , , score]) => score - (page.startsWith("api/") ? 20 : 0)
    + (page === "index" && wanted.some(word => /^(install|start|pip|setup)/.test(word)) ? 100 : 0)
    + 60 * wanted.filter(word => (DEFINED[word] || []).includes(page)).length
    + 20 * wanted.filter(word => title.toLowerCase().includes(word)).length,
  objNameMatch: 11, objPartialMatch: 6, objPrio: {0: 15, 1: 5, 2: -5}, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};
