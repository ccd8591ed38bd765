//! Tokens by which clients authenticate themselves, from a file: memcached's option `-Y`.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Most tokens in a file.
const TOKENS_MAX: usize = 8;
/// Longest user name and longest password.
pub(crate) const NAME_MAX: usize = 256;
/// Permissions that the file must not have: writing by the group of its owner, and all of other
/// users.
const OTHERS_MAY_USE: u32 = 0o027;

/// Pairs of user name and password, of which a client must know one.
pub struct Tokens {
    pairs: Vec<(Vec<u8>, Vec<u8>)>,
}

impl Tokens {
    /// Reads a file with a line `user:password` for each pair.
    ///
    /// # Errors
    /// If the file cannot be read, if users other than the owner and its group can read it or users
    /// other than the owner can change it, or if it has no line, too many, or one that is not as
    /// above.
    pub fn read(path: &Path) -> io::Result<Self> {
        let invalid = |error: String| {
            io::Error::new(io::ErrorKind::InvalidData, format!("{}: {error}", path.display()))
        };
        let mut file = File::open(path)?;
        let metadata = file.metadata()?;
        let mode = metadata.mode() & 0o7777;
        if mode & OTHERS_MAY_USE != 0 {
            let why = format!("other users may read or change it (mode {mode:o}): run chmod 600 on it");
            return Err(invalid(why));
        }
        let own = rustix::process::geteuid().as_raw();
        if metadata.uid() != own && metadata.uid() != 0 {
            return Err(invalid(format!("it belongs to user {}, not to user {own} or root", metadata.uid())));
        }
        let mut text = Vec::new();
        file.read_to_end(&mut text)?;
        Self::parse(&text).map_err(invalid)
    }

    fn parse(text: &[u8]) -> Result<Self, String> {
        let mut pairs = Vec::new();
        for (number, line) in text.split(|byte| *byte == b'\n').enumerate() {
            let line = line.strip_suffix(b"\r").unwrap_or(line);
            if line.is_empty() {
                continue;
            }
            let pair = line.iter().position(|byte| *byte == b':').map(|at| (&line[..at], &line[at + 1..]));
            match pair {
                Some((user, password))
                    if user.len() <= NAME_MAX && password.len() <= NAME_MAX && !user.is_empty() =>
                {
                    pairs.push((user.to_vec(), password.to_vec()));
                }
                _ => return Err(format!("line {} is not USER:PASSWORD", number + 1)),
            }
        }
        match pairs.len() {
            0 => Err("no line USER:PASSWORD".to_owned()),
            1..=TOKENS_MAX => Ok(Self { pairs }),
            more => Err(format!("{more} lines; at most {TOKENS_MAX} are read")),
        }
    }

    /// Whether a pair is one of these. The time depends only on the lengths.
    #[must_use]
    pub fn accept(&self, user: &[u8], password: &[u8]) -> bool {
        let mut accepted = false;
        for (known_user, known_password) in &self.pairs {
            accepted |= is_same(known_user, user) & is_same(known_password, password);
        }
        accepted
    }
}

fn is_same(known: &[u8], given: &[u8]) -> bool {
    let mut difference = u8::from(known.len() != given.len());
    for (at, byte) in given.iter().enumerate() {
        difference |= byte ^ known.get(at).copied().unwrap_or_default();
    }
    std::hint::black_box(difference) == 0
}

impl fmt::Debug for Tokens {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Tokens").field("pairs", &self.pairs.len()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_parsed_and_compared_whole() {
        let tokens = Tokens::parse(b"alice:secret\r\nbob:a:b\n\n").unwrap();
        assert!(tokens.accept(b"alice", b"secret") && tokens.accept(b"bob", b"a:b"));
        for (user, password) in [("alice", "secre"), ("alice", "secret1"), ("bob", "secret"), ("", "")] {
            assert!(!tokens.accept(user.as_bytes(), password.as_bytes()), "{user}:{password}");
        }
        for (text, error) in [("", "no line"), ("alice\n", "line 1 is not"), ("a:b\n:c", "line 2 is not")] {
            let found = Tokens::parse(text.as_bytes()).unwrap_err();
            assert!(found.starts_with(error), "{found}");
        }
        assert!(Tokens::parse(&b"a:b\n".repeat(9)).is_err());
    }
}
