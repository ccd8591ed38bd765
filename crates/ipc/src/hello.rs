//! What a program says first.

use crate::frame::{FrameError, Reader, Token};

/// A program's first message: what it gives the agent to be paged by. With a userfaultfd if it is no forked child.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Hello {
    /// The run that it belongs to.
    pub token: Token,
    /// Whether it was forked from a program that is paged already: the agent has its userfaultfd from the fork.
    pub is_child: bool,
    /// What a forked child found in its canary page: the agent's number for it. Of no meaning in others.
    pub number: u64,
    /// Where pages are moved first: [`crate::TAKE_PAGES_MAX`] pages under the program's userfaultfd.
    pub antechamber: u64,
    /// Where they wait to be copied: [`crate::BUFFERS`] buffers under an event-free userfaultfd.
    pub staging: u64,
    /// A page that is empty in each child, so that the agent can write there which one it is.
    pub canary: u64,
    /// The shim's own memory, from here...
    pub private_start: u64,
    /// ...to here, is never touched.
    pub private_end: u64,
    /// Only memory from here...
    pub only_start: u64,
    /// ...to here is to be paged, and is counted; both 0: all of the program's.
    pub only_end: u64,
}

/// Parse a hello's body.
pub(crate) fn parse(reader: &mut Reader<'_>) -> Result<Hello, FrameError> {
    let token = Token(reader.array()?);
    let is_child = match reader.u32()? {
        0 => false,
        1 => true,
        _ => return Err(FrameError::BadField("is_child")),
    };
    let number = reader.u64()?;
    let mut address = |name| {
        let value = reader.u64()?;
        if is_user_page(value) { Ok(value) } else { Err(FrameError::BadField(name)) }
    };
    let hello = Hello {
        token,
        is_child,
        number,
        antechamber: address("antechamber")?,
        staging: address("staging")?,
        canary: address("canary")?,
        private_start: address("private_start")?,
        private_end: address("private_end")?,
        only_start: reader.u64()?,
        only_end: reader.u64()?,
    };
    if hello.private_start >= hello.private_end {
        return Err(FrameError::BadField("private_end"));
    }
    let is_range =
        hello.only_start < hello.only_end && is_user_page(hello.only_start) && is_user_page(hello.only_end);
    if (hello.only_start, hello.only_end) != (0, 0) && !is_range {
        return Err(FrameError::BadField("only_end"));
    }
    Ok(hello)
}

/// Whether it is a user's address, and page-aligned.
fn is_user_page(address: u64) -> bool {
    address != 0 && address.is_multiple_of(4096) && address < 1 << 47
}

/// The pieces of its body, in order.
pub(crate) fn parts(hello: &Hello, mut put: impl FnMut(&[u8])) {
    put(&hello.token.0);
    put(&u32::from(hello.is_child).to_le_bytes());
    put(&hello.number.to_le_bytes());
    let own = [hello.antechamber, hello.staging, hello.canary, hello.private_start, hello.private_end];
    for address in own.into_iter().chain([hello.only_start, hello.only_end]) {
        put(&address.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Frame;

    const HELLO: Hello = Hello {
        token: Token([7; 16]),
        is_child: false,
        number: 5,
        antechamber: 0x1000,
        staging: 0x2000,
        canary: 0x3000,
        private_start: 0x4000,
        private_end: 0x9000,
        only_start: 0,
        only_end: 0,
    };

    fn parsed(hello: Hello) -> Result<Frame, FrameError> {
        let mut bytes = Vec::new();
        Frame::Hello(hello).write(&mut bytes);
        Frame::parse(&bytes)
    }

    #[test]
    fn a_range_of_memory_is_one_or_none() {
        let ends = [
            (0x1000, 0),
            (0, 0x1000),
            (0x2000, 0x1000),
            (0x1000, 0x1000),
            (0x1001, 0x3000),
            (0x1000, 1 << 47),
        ];
        for (only_start, only_end) in ends {
            let hello = Hello { only_start, only_end, ..HELLO };
            assert_eq!(parsed(hello), Err(FrameError::BadField("only_end")), "{only_start:x} {only_end:x}");
        }
        assert!(parsed(HELLO).is_ok());
        assert!(parsed(Hello { only_start: 0x1000, only_end: 0x2000, ..HELLO }).is_ok());
    }
}
