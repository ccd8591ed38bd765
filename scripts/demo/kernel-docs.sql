-- Builds a search index of the Linux kernel's documentation in memory, searches it for the best
-- page for many words, and finds the most similar pages.
--
-- Run it with sqlite3 in the folder of the pages:
--   cd /usr/share/doc/linux-doc-*/html && sqlite3 -batch :memory: < kernel-docs.sql
--
-- The output is the same in every run, so that runs can be compared byte for byte.
.bail on
.mode list
.separator "  "
-- Sort in memory instead of temporary files: the demo limits the memory of this program.
PRAGMA temp_store = MEMORY;

-- 1. Read every page of the corpus.
CREATE TABLE page(id INTEGER PRIMARY KEY, name TEXT, body TEXT);
INSERT INTO page(name, body)
  SELECT substr(name, 3), CAST(data AS TEXT) FROM fsdir('.') WHERE name GLOB '*.html' ORDER BY name;
SELECT 'pages', count(*), sum(length(body)) FROM page;

-- 2. Index the words, stemmed.
CREATE VIRTUAL TABLE search USING fts5(
  name, body, content='page', content_rowid='id', tokenize='porter unicode61');
INSERT INTO search(search) VALUES('rebuild');
CREATE VIRTUAL TABLE vocabulary USING fts5vocab(search, 'row');
CREATE VIRTUAL TABLE occurrence USING fts5vocab(search, 'instance');
SELECT 'words', count(*), sum(cnt) FROM vocabulary;

-- 3. List the pages of each word that is on 2 to 400 pages.
--    More frequent words do not distinguish pages.
CREATE TABLE word AS
  SELECT term, doc AS pages FROM vocabulary
  WHERE doc BETWEEN 2 AND 400 AND term GLOB '[a-z]*' ORDER BY term;
SELECT 'telling words', count(*), sum(pages) FROM word;
CREATE TABLE posting AS
  SELECT w.term AS term, o.doc AS page, 1.0 / w.pages AS weight, count(*) AS times
  FROM word w CROSS JOIN occurrence o ON o.term = w.term GROUP BY w.term, o.doc;
SELECT 'postings', count(*), sum(times) FROM posting;
CREATE INDEX posting_by_page ON posting(page, term, weight);
CREATE INDEX posting_by_term ON posting(term, page);

-- 4. Find the best page for every twentieth word.
SELECT 'best page', t.term,
  (SELECT name || '  ' || round(bm25(search), 4) FROM search
   WHERE search MATCH '"' || t.term || '"' ORDER BY rank, name LIMIT 1)
FROM (SELECT term FROM word WHERE rowid % 20 = 0) t;

-- 5. Find for every tenth page the pages that share the most words of step 3.
CREATE TABLE alike AS
  SELECT a.page AS page, b.page AS other, sum(a.weight) AS score
  FROM posting a JOIN posting b ON b.term = a.term AND b.page > a.page
  WHERE a.page % 10 = 0
  GROUP BY a.page, b.page HAVING count(*) >= 5;
SELECT 'pairs', count(*) FROM alike;
SELECT 'alike', p.name, q.name, round(score, 4)
FROM alike JOIN page p ON p.id = page JOIN page q ON q.id = other
ORDER BY score DESC, page, other LIMIT 40;
