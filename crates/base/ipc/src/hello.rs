//! The first frame of a program: the addresses that the agent needs to page it.

use crate::frame::{FrameError, Reader, RunToken};

/// Lowest address that no user mapping on x86-64 reaches.
const USER_ADDRESS_END: u64 = 1 << 47;

/// Bytes of a page.
const PAGE: usize = 4096;
/// Maximum number of connect-back requests of a process.
pub const CONNECT_BACK_REQUESTS_MAX: usize = 8;
/// Bytes from [`ProgramHello::canary`] that are empty in each forked child: the canary, the page of
/// the proof, and a page for each connect-back request.
pub const CANARY_BYTES: usize = PAGE * (2 + CONNECT_BACK_REQUESTS_MAX);
/// The page by which a forked child proves its memory after its hello, as an offset from the
/// canary. The child does not touch it.
pub const PROOF_PAGE: usize = PAGE;
/// Bytes of the name of a connect-back request's socket.
pub const SOCKET_NAME_BYTES: usize = 16;
/// Bytes of the secret of a connect-back request's socket.
pub const SOCKET_SECRET_BYTES: usize = 16;
/// Bytes of the address of a connect-back request's socket.
pub const SOCKET_ADDRESS_BYTES: usize = SOCKET_ADDRESS_START.len() + 2 * SOCKET_NAME_BYTES;
const SOCKET_ADDRESS_START: &[u8] = b"aquifer-";

/// The page of connect-back request `number`, as an offset from the canary.
///
/// A forked child that cannot reach the agent's socket by its path sends a *connect-back request*:
/// it reads the page of its next request. The agent then listens at a new socket in the child's
/// network namespace, whose address has no path. It fills the page, which begins with the name of
/// the socket and a secret, or with zeros if there is no socket. All users of the namespace see the
/// name, and can listen at it when the agent has gone: so the agent sends the secret first on each
/// connection.
#[must_use]
pub fn connect_back_page(number: usize) -> usize {
    PAGE * (2 + number)
}

/// The address of a connect-back request's socket in the abstract namespace of Unix sockets,
/// without the zero before it.
#[must_use]
pub fn socket_address(name: [u8; SOCKET_NAME_BYTES]) -> [u8; SOCKET_ADDRESS_BYTES] {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut address = [0; SOCKET_ADDRESS_BYTES];
    let (start, digits) = address.split_at_mut(SOCKET_ADDRESS_START.len());
    start.copy_from_slice(SOCKET_ADDRESS_START);
    for (byte, pair) in name.iter().zip(digits.chunks_exact_mut(2)) {
        pair[0] = DIGITS[usize::from(byte >> 4)];
        pair[1] = DIGITS[usize::from(byte & 15)];
    }
    address
}

/// Body of [`crate::Frame::Hello`]: addresses in the program that the agent uses to page it.
///
/// All addresses are page-aligned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ProgramHello {
    /// The run that the program belongs to.
    pub token: RunToken,
    /// Whether the program was forked from a paged program. The agent then has its userfaultfd
    /// from the fork event, and the frame carries none.
    pub is_child: bool,
    /// The agent's number for a forked child, which the child has read in its canary page.
    /// Meaningless for other programs.
    pub child_number: u64,
    /// The bounce buffer, to which evicted pages are moved first: [`crate::BATCH_PAGES_MAX`] pages
    /// under the program's userfaultfd.
    pub bounce_buffer: u64,
    /// The staging buffers, in which evicted pages wait for the agent:
    /// [`crate::STAGING_BUFFERS`] buffers under a userfaultfd without events.
    pub staging: u64,
    /// The canary, a page that is empty in each forked child. The agent writes the child's number
    /// there, so that the child's hello identifies the fork event. The rest of [`CANARY_BYTES`] is
    /// for the proof and for connect-back requests.
    pub canary: u64,
    /// Start of the shim's own memory, which is never registered.
    pub private_start: u64,
    /// End of the shim's own memory.
    pub private_end: u64,
    /// Start of the only memory that is paged and counted. 0 with [`Self::paged_end`] 0: all
    /// memory of the program.
    pub paged_start: u64,
    /// End of the only memory that is paged and counted.
    pub paged_end: u64,
}

/// Parses the body of a hello.
pub(crate) fn parse(reader: &mut Reader<'_>) -> Result<ProgramHello, FrameError> {
    let token = RunToken(reader.array()?);
    let is_child = match reader.u32()? {
        0 => false,
        1 => true,
        _ => return Err(FrameError::BadField("is_child")),
    };
    let child_number = reader.u64()?;
    let mut address = |name| {
        let value = reader.u64()?;
        if is_user_page(value) { Ok(value) } else { Err(FrameError::BadField(name)) }
    };
    let hello = ProgramHello {
        token,
        is_child,
        child_number,
        bounce_buffer: address("bounce_buffer")?,
        staging: address("staging")?,
        canary: address("canary")?,
        private_start: address("private_start")?,
        private_end: address("private_end")?,
        paged_start: reader.u64()?,
        paged_end: reader.u64()?,
    };
    if hello.private_start >= hello.private_end {
        return Err(FrameError::BadField("private_end"));
    }
    let is_range = hello.paged_start < hello.paged_end
        && is_user_page(hello.paged_start)
        && is_user_page(hello.paged_end);
    if (hello.paged_start, hello.paged_end) != (0, 0) && !is_range {
        return Err(FrameError::BadField("paged_end"));
    }
    Ok(hello)
}

/// Whether the address is page-aligned, not null, and below the kernel's addresses.
fn is_user_page(address: u64) -> bool {
    address != 0 && address.is_multiple_of(4096) && address < USER_ADDRESS_END
}

/// Passes the pieces of the body to `write`, in order.
pub(crate) fn write_parts(hello: &ProgramHello, mut write: impl FnMut(&[u8])) {
    write(&hello.token.0);
    write(&u32::from(hello.is_child).to_le_bytes());
    write(&hello.child_number.to_le_bytes());
    let own = [hello.bounce_buffer, hello.staging, hello.canary, hello.private_start, hello.private_end];
    for address in own.into_iter().chain([hello.paged_start, hello.paged_end]) {
        write(&address.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Frame;

    const HELLO: ProgramHello = ProgramHello {
        token: RunToken([7; 16]),
        is_child: false,
        child_number: 5,
        bounce_buffer: 0x1000,
        staging: 0x2000,
        canary: 0x3000,
        private_start: 0x4000,
        private_end: 0x9000,
        paged_start: 0,
        paged_end: 0,
    };

    fn parsed(hello: ProgramHello) -> Result<Frame, FrameError> {
        let mut bytes = Vec::new();
        Frame::Hello(hello).write(&mut bytes);
        Frame::parse(&bytes)
    }

    #[test]
    fn the_paged_range_is_empty_or_a_valid_range() {
        let ends = [
            (0x1000, 0),
            (0, 0x1000),
            (0x2000, 0x1000),
            (0x1000, 0x1000),
            (0x1001, 0x3000),
            (0x1000, 1 << 47),
        ];
        for (paged_start, paged_end) in ends {
            let hello = ProgramHello { paged_start, paged_end, ..HELLO };
            assert_eq!(
                parsed(hello),
                Err(FrameError::BadField("paged_end")),
                "{paged_start:x} {paged_end:x}"
            );
        }
        assert!(parsed(HELLO).is_ok());
        assert!(parsed(ProgramHello { paged_start: 0x1000, paged_end: 0x2000, ..HELLO }).is_ok());
    }
}
