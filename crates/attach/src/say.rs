//! The last words of a program that cannot be paged.

use core::fmt::{Display, Write};

use aquifer_ipc::EXIT_FAILED;

/// Text on the stack: nothing may be allocated in a forked child.
struct Line {
    bytes: [u8; 512],
    used: usize,
}

impl Write for Line {
    fn write_str(&mut self, text: &str) -> core::fmt::Result {
        let room = self.bytes.len() - self.used;
        let taken = text.len().min(room);
        self.bytes[self.used..self.used + taken].copy_from_slice(&text.as_bytes()[..taken]);
        self.used += taken;
        Ok(())
    }
}

/// Say why and end the program. Going on unpaged would break the promised limit.
pub fn fail(reason: &str, error: isize) -> ! {
    if error == 0 { fail_with(&reason) } else { fail_with(&format_args!("{reason} (error {error})")) }
}

/// Say why and end the program.
pub fn fail_with(reason: &dyn Display) -> ! {
    let mut line = Line { bytes: [0; 512], used: 0 };
    // Writing into the buffer cannot fail: it cuts.
    let _ = writeln!(line, "aquifer: {reason}");
    // SAFETY: writes from a local buffer, then ends the process without running the program's exit handlers.
    unsafe {
        libc::write(2, line.bytes.as_ptr().cast(), line.used);
        libc::_exit(EXIT_FAILED)
    }
}
