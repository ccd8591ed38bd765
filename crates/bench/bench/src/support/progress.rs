//! Progress bar of a bench.

use indicatif::{ProgressBar, ProgressStyle};

/// A bar with this number of steps, the elapsed time and a message.
pub fn bar(steps: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("{elapsed} {wide_bar} {pos}/{len}  {msg}");
    let bar = ProgressBar::new(steps as u64);
    match style {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}
