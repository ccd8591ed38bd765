//! The flags of meta commands.

use super::base64::{self, DecodedKey};
use super::number;
use super::words::Words;

/// Most words of a meta command.
pub const META_WORDS_MAX: usize = 19;
/// Longest opaque token in bytes, including the flag.
pub const OPAQUE_MAX: usize = 32;

/// The flags of a meta command that change its effect. Flags that only request fields of the reply
/// are read when the reply is written, because it has the fields in the order of the request.
#[derive(Clone, Debug, Default)]
pub struct MetaFlags {
    /// `b`: the decoded key.
    pub binary_key: Option<DecodedKey>,
    /// `N`: stores an item that is missing, with this expiry.
    pub vivify_exptime: Option<i32>,
    /// `T`: the new expiry.
    pub exptime: Option<i32>,
    /// `R`: requests a replacement if the item expires before this.
    pub recache_exptime: Option<i32>,
    /// `C`: the cas number that the item must have.
    pub cas: Option<u64>,
    /// `E`: the cas number that the item gets.
    pub new_cas: Option<u64>,
    /// `F`: the client's flags.
    pub client_flags: u32,
    /// `M`: the mode.
    pub mode: Option<u8>,
    /// `J`: the value of a counter that is missing.
    pub initial: u64,
    /// `D`: the number that is added to a counter, or subtracted.
    pub delta: Option<u64>,
    /// `v`: the reply has the value.
    pub returns_value: bool,
    /// `q`: the usual reply is left out.
    pub is_quiet: bool,
    /// `u`: the read is not counted.
    pub is_uncounted: bool,
    /// `I`: invalidates the item.
    pub invalidates: bool,
    /// `x`: removes the value and keeps the item.
    pub removes_value: bool,
    /// Whether a flag `O` is longer than [`OPAQUE_MAX`].
    pub opaque_is_too_long: bool,
}

/// Reads flags. `key` is the word that the flag `b` decodes.
///
/// # Errors
/// The text of the error, without the end of the line.
pub fn parse(key: &[u8], flags: &[&[u8]]) -> Result<MetaFlags, &'static str> {
    const BAD_TOKEN: &str = "CLIENT_ERROR bad token in command line format";
    let mut parsed = MetaFlags::default();
    let mut seen = 0u128;
    // An invalid number does not end the loop: a later invalid or duplicate flag takes precedence.
    let mut error = None;
    for flag in flags {
        let (name, token) = (flag[0], &flag[1..]);
        if name >= 127 || seen & 1 << name != 0 {
            return Err("CLIENT_ERROR duplicate flag");
        }
        seen |= 1 << name;
        let mut signed = || number::int32(token).or_else(|| note(&mut error, BAD_TOKEN));
        match name {
            b'N' => parsed.vivify_exptime = signed(),
            b'T' => parsed.exptime = signed(),
            b'R' => parsed.recache_exptime = signed(),
            b'C' => parsed.cas = number::uint64(token).or_else(|| note(&mut error, BAD_TOKEN)),
            b'E' => parsed.new_cas = number::uint64(token).or_else(|| note(&mut error, BAD_TOKEN)),
            b'F' => match number::uint32(token) {
                Some(client_flags) => parsed.client_flags = client_flags,
                None => error = error.or(Some("CLIENT_ERROR bad command line format")),
            },
            b'J' => match number::uint64(token) {
                Some(initial) => parsed.initial = initial,
                None => error = Some("CLIENT_ERROR invalid numeric initial value"),
            },
            b'D' => match number::uint64(token) {
                Some(delta) => parsed.delta = Some(delta),
                None => error = Some("CLIENT_ERROR invalid numeric delta value"),
            },
            b'M' if token.len() == 1 => parsed.mode = Some(token[0]),
            b'M' => error = Some("CLIENT_ERROR incorrect length for M token"),
            b'b' => {
                parsed.binary_key = base64::decode(key);
                if parsed.binary_key.is_none() {
                    error = Some("CLIENT_ERROR error decoding key");
                }
            }
            b'O' => parsed.opaque_is_too_long = flag.len() > OPAQUE_MAX,
            b'v' => parsed.returns_value = true,
            b'q' => parsed.is_quiet = true,
            b'u' => parsed.is_uncounted = true,
            b'I' => parsed.invalidates = true,
            b'x' => parsed.removes_value = true,
            b'P' | b'L' | b'c' | b'f' | b'h' | b'k' | b'l' | b's' | b't' => {}
            _ => return Err("CLIENT_ERROR invalid flag"),
        }
    }
    error.map_or(Ok(parsed), Err)
}

fn note<T>(error: &mut Option<&'static str>, text: &'static str) -> Option<T> {
    *error = Some(text);
    None
}

/// The flags of a command, which follow its key and, in `ms`, the length.
#[must_use]
pub fn flags_of<'w, 'a>(words: &'w Words<'a>, before: usize) -> &'w [&'a [u8]] {
    words.get(before..).unwrap_or_default()
}
