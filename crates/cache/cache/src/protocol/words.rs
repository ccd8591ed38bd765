//! The words of a line.

use smallvec::SmallVec;

/// Most words of a command outside the `get` family.
pub const WORDS_MAX: usize = 23;

/// The words of a line, or the first [`WORDS_MAX`] of them.
pub type Words<'a> = SmallVec<[&'a [u8]; WORDS_MAX]>;

/// The part of a line before its first zero byte; the remainder is ignored.
#[inline]
#[must_use]
pub fn text_of(line: &[u8]) -> &[u8] {
    memchr::memchr(0, line).map_or(line, |end| &line[..end])
}

/// Splits a line at its spaces. Other white space is a part of words.
#[inline]
#[must_use]
pub fn split(text: &[u8]) -> Words<'_> {
    let mut words = Words::new();
    let mut at = 0;
    while words.len() < WORDS_MAX
        && let Some((word, end)) = next(text, at)
    {
        words.push(word);
        at = end;
    }
    words
}

/// A text without the spaces at its ends.
#[must_use]
pub fn trim(text: &[u8]) -> &[u8] {
    let start = text.iter().take_while(|byte| **byte == b' ').count();
    let end = text[start..].iter().rev().take_while(|byte| **byte == b' ').count();
    &text[start..text.len() - end]
}

/// The word that begins at or after an offset, and the offset of its end.
#[inline]
#[must_use]
pub fn next(text: &[u8], mut at: usize) -> Option<(&[u8], usize)> {
    while *text.get(at)? == b' ' {
        at += 1;
    }
    let end = memchr::memchr(b' ', &text[at..]).map_or(text.len(), |len| at + len);
    Some((&text[at..end], end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_separated_by_spaces_only() {
        let words = split(b"  set a\tb  1 ");
        assert_eq!(words.as_slice(), [&b"set"[..], b"a\tb", b"1"]);
        assert_eq!(split(b"   ").len(), 0);
        assert_eq!(split(&b"x ".repeat(30)).len(), WORDS_MAX);
        assert_eq!(text_of(b"get a\0b"), b"get a");
    }
}
