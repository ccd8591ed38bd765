//! The request by which a client authenticates itself.

use super::{Context, LINE_MAX, Replies, Session, Step};
use crate::protocol::{number, words};
use crate::tokens::{NAME_MAX, Tokens};

/// Longest token that a client may show.
const TOKEN_MAX: usize = 2 * NAME_MAX + 64;

impl Session {
    /// Reads the request with a token: a `set` whose value is the user and the password.
    pub(super) fn authenticate<'p>(
        &mut self,
        input: &[u8],
        tokens: &Tokens,
        context: &Context<'p>,
        out: &mut Replies<'p>,
    ) -> Step {
        let Some(newline) = memchr::memchr(b'\n', input) else {
            return if input.len() > LINE_MAX { Step::Close } else { Step::Incomplete(input.len() + 1) };
        };
        let after = newline + 1;
        let words = words::split(words::text_of(&input[..newline]));
        let len = words.get(4).and_then(|word| number::uint32(word)).filter(|_| words[0] == b"set");
        let Some(len) = len else {
            out.push_line("CLIENT_ERROR unauthenticated");
            return Step::Used(after);
        };
        if len as usize > TOKEN_MAX {
            return Step::Close;
        }
        let end = after + len as usize + 2;
        let Some(block) = input.get(after..end) else { return Step::Incomplete(end) };
        let Some(token) = block.strip_suffix(b"\r\n") else {
            out.push_line("CLIENT_ERROR bad command line termination");
            return Step::Used(end);
        };
        let words = words::split(words::text_of(token));
        let [user, password, ..] = words.as_slice() else {
            out.push_line("CLIENT_ERROR bad authentication token format");
            return Step::Used(end);
        };
        context.access.counters.auth_cmds.add(1);
        if tokens.accept(user, password) {
            self.is_authenticated = true;
            out.push_line("STORED");
        } else {
            context.access.counters.auth_errors.add(1);
            out.push_line("CLIENT_ERROR authentication failure");
        }
        Step::Used(end)
    }
}
