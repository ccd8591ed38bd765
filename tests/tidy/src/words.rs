//! Words of the project's texts and names, and the glossary's tables.

use crate::markdown::{code_spans, table_rows};

/// A word of a text, or a part of an identifier: `free_extent` and `FreeExtent` have two.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Word {
    /// The word in lower case.
    pub text: String,
    /// The line, counted from 1.
    pub line: usize,
    /// True if no punctuation separates the word from the previous one.
    pub continues: bool,
}

/// Splits a text into words: at punctuation, blanks, underscores, and before capitals.
#[must_use]
pub fn words(text: &str) -> Vec<Word> {
    let characters: Vec<char> = text.chars().collect();
    let mut words = Vec::new();
    let (mut at, mut line, mut continues) = (0, 1, false);
    while let Some(&character) = characters.get(at) {
        if character.is_alphanumeric() {
            let end = word_end(&characters, at);
            let text: String = characters[at..end].iter().collect();
            words.push(Word { text: text.to_lowercase(), line, continues });
            continues = true;
            at = end;
            continue;
        }
        line += usize::from(character == '\n');
        continues = continues && " \t\n_/!#*".contains(character);
        at += 1;
    }
    words
}

/// The end of the word that begins at `start`.
fn word_end(characters: &[char], start: usize) -> usize {
    let mut end = start + 1;
    while let Some(&next) = characters.get(end).filter(|next| next.is_alphanumeric()) {
        let before = characters[end - 1];
        let is_followed_by_lower = characters.get(end + 1).is_some_and(|after| after.is_lowercase());
        if next.is_uppercase() && (!before.is_uppercase() || is_followed_by_lower) {
            break;
        }
        end += 1;
    }
    end
}

/// The lines on which a text has one of the phrases, each with the phrase.
#[must_use]
pub fn find_phrases<'a>(text: &str, phrases: &'a [String]) -> Vec<(usize, &'a str)> {
    let words = words(text);
    let mut found = Vec::new();
    for phrase in phrases {
        let parts: Vec<&str> = phrase.split(' ').collect();
        for window in words.windows(parts.len()) {
            let is_equal = window.iter().zip(&parts).all(|(word, part)| word.text == *part);
            if is_equal && window[1..].iter().all(|word| word.continues) {
                found.push((window[0].line, phrase.as_str()));
            }
        }
    }
    found.sort_unstable();
    found
}

/// The name that a line of Rust defines: of a function, type, trait or module.
#[must_use]
pub fn defined_name(line: &str) -> Option<&str> {
    let mut rest = line.trim_start();
    loop {
        let (word, after) = rest.split_once(' ')?;
        match word {
            "fn" | "struct" | "enum" | "trait" | "type" | "union" | "mod" => {
                let end = after.find(|character: char| !character.is_alphanumeric() && character != '_');
                return Some(&after[..end.unwrap_or(after.len())]);
            }
            "pub" | "pub(crate)" | "pub(super)" | "const" | "async" | "unsafe" | "extern" | "\"C\"" => {
                rest = after;
            }
            _ => return None,
        }
    }
}

/// Words and phrases of the glossary's second table, by where they are banned.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct BannedWords {
    /// Banned everywhere.
    pub everywhere: Vec<String>,
    /// Banned in the names of types, functions, modules and files.
    pub in_names: Vec<String>,
}

/// Reads the table `| write | not | where |` of the glossary.
///
/// # Panics
/// If there is no such table, or a row has another third cell than `all`, `names` or `sense`.
#[must_use]
pub fn banned_words(glossary: &str) -> BannedWords {
    let mut banned = BannedWords::default();
    let rows = table_rows(glossary, &["write", "not", "where"]);
    assert!(!rows.is_empty(), "the glossary has no table '| write | not | where |'");
    for row in rows {
        let phrases = row[1].split(';').map(|phrase| phrase.trim().to_owned());
        match row[2].as_str() {
            "all" => banned.everywhere.extend(phrases),
            "names" => banned.in_names.extend(phrases),
            "sense" => {}
            other => panic!("the glossary bans \"{}\" in an unknown place: \"{other}\"", row[1]),
        }
    }
    banned
}

/// A row of the glossary's first table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GlossaryEntry {
    /// The word.
    pub word: String,
    /// Paths of the code that the word stands for.
    pub paths: Vec<String>,
}

/// Reads the table `| word | meaning | where |` of the glossary.
#[must_use]
pub fn glossary_entries(glossary: &str) -> Vec<GlossaryEntry> {
    table_rows(glossary, &["word", "meaning", "where"])
        .into_iter()
        .map(|row| GlossaryEntry {
            word: row[0].clone(),
            paths: code_spans(&row[2]).map(str::to_owned).collect(),
        })
        .collect()
}
