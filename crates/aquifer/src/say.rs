//! What commands print. A reader may leave at any time (`aquifer status | head -1`): then the command goes on and ends as it would have.
//! Output that cannot be written for another reason fails the command, once it has done its work. An error message that cannot be written is lost.

use std::io;
use std::sync::OnceLock;

use tracing_subscriber::EnvFilter;

/// Why standard output could not be written, if it could not.
static UNWRITTEN: OnceLock<String> = OnceLock::new();

/// Notes the outcome of a write to standard output.
pub fn note(written: io::Result<()>) {
    if let Err(error) = written
        && error.kind() != io::ErrorKind::BrokenPipe
    {
        let _first_counts = UNWRITTEN.set(error.to_string());
    }
}

/// Why standard output could not be written; `None` if it could, or if its reader left.
pub fn unwritten() -> Option<&'static str> {
    UNWRITTEN.get().map(String::as_str)
}

/// `print!`, without a panic when it cannot be written.
#[macro_export]
macro_rules! say {
    ($($what:tt)*) => {{
        use std::io::Write;
        $crate::say::note(write!(std::io::stdout(), $($what)*));
    }};
}

/// `println!`, likewise.
#[macro_export]
macro_rules! say_line {
    ($($what:tt)*) => {{
        use std::io::Write;
        $crate::say::note(writeln!(std::io::stdout(), $($what)*));
    }};
}

/// A line on standard error that begins with the program's name. It is lost if it cannot be written.
#[macro_export]
macro_rules! say_error {
    ($($what:tt)*) => {{
        use std::io::Write;
        let _lost = writeln!(std::io::stderr(), "aquifer: {}", format_args!($($what)*));
    }};
}

pub use {say, say_error, say_line};

/// Sends what a daemon logs to its standard error; `RUST_LOG` says what is logged.
pub(crate) fn log_to_stderr() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    // A log that cannot be written, on a full disk, must not end a daemon: the subscriber would complain on the same stderr, and panic.
    let log = tracing_subscriber::fmt().log_internal_errors(false).with_env_filter(filter);
    log.with_writer(std::io::stderr).with_ansi(false).init();
}
