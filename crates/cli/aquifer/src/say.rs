//! Output of commands.
//!
//! If the reader of standard output closes it (`aquifer status | head -1`), the command continues
//! and keeps its exit code. If standard output cannot be written for another reason, such as a full
//! disk, the command completes its work and then fails. A message that standard error does not
//! accept is lost.

use std::io;
use std::sync::OnceLock;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format;

use crate::log_limit::LimitedFormat;

/// The first error of a write to standard output.
static WRITE_ERROR: OnceLock<String> = OnceLock::new();

/// Records the result of a write to standard output.
pub fn record_write(result: io::Result<()>) {
    if let Err(error) = result
        && error.kind() != io::ErrorKind::BrokenPipe
    {
        let _keeps_the_first = WRITE_ERROR.set(error.to_string());
    }
}

/// The first error of a write to standard output; `None` if all writes succeeded or the reader
/// closed it.
pub fn write_error() -> Option<&'static str> {
    WRITE_ERROR.get().map(String::as_str)
}

/// Like `print!`, but records an error instead of panicking.
#[macro_export]
macro_rules! say {
    ($($what:tt)*) => {{
        use std::io::Write;
        $crate::say::record_write(write!(std::io::stdout(), $($what)*));
    }};
}

/// Like `println!`, but records an error instead of panicking.
#[macro_export]
macro_rules! say_line {
    ($($what:tt)*) => {{
        use std::io::Write;
        $crate::say::record_write(writeln!(std::io::stdout(), $($what)*));
    }};
}

/// Writes a line to standard error, after the program's name. An error of the write is ignored.
#[macro_export]
macro_rules! say_error {
    ($($what:tt)*) => {{
        use std::io::Write;
        let _lost = writeln!(std::io::stderr(), "aquifer: {}", format_args!($($what)*));
    }};
}

pub use {say, say_error, say_line};

/// Writes the daemon's log to standard error, filtered by `RUST_LOG` (default: `info`), and limited
/// for each user.
pub(crate) fn log_to_stderr() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    // A full disk must not end a daemon. By default the subscriber reports a failed write to the
    // same standard error, and panics if that fails, too.
    let log = tracing_subscriber::fmt().log_internal_errors(false).with_env_filter(filter);
    let log = log.with_ansi(false).event_format(LimitedFormat::new(format()));
    log.with_writer(std::io::stderr).init();
}
