//! Ends a program that cannot be paged, with a message.

use core::fmt::{Display, Write};

use aquifer_ipc::EXIT_FAILED;

/// A line of text on the stack, since a forked child must not allocate memory.
struct Line {
    bytes: [u8; 512],
    used: usize,
}

impl Write for Line {
    /// Appends a text. Bytes that do not fit are omitted.
    fn write_str(&mut self, text: &str) -> core::fmt::Result {
        let length = text.len().min(self.bytes.len() - self.used);
        self.bytes[self.used..self.used + length].copy_from_slice(&text.as_bytes()[..length]);
        self.used += length;
        Ok(())
    }
}

/// Prints the reason and ends the program. `errno` is appended unless it is 0.
///
/// Without paging, the program would exceed the limit of its run.
pub fn exit(reason: &str, errno: isize) -> ! {
    if errno == 0 { exit_with(&reason) } else { exit_with(&format_args!("{reason} (errno {errno})")) }
}

/// Prints the reason and ends the program.
pub fn exit_with(reason: &dyn Display) -> ! {
    let mut line = Line { bytes: [0; 512], used: 0 };
    // This cannot fail: bytes that do not fit are omitted.
    let _ = writeln!(line, "aquifer: {reason}");
    // SAFETY: writes from a local buffer, then ends the process without running the program's exit
    // handlers.
    unsafe {
        libc::write(libc::STDERR_FILENO, line.bytes.as_ptr().cast(), line.used);
        libc::_exit(EXIT_FAILED)
    }
}
