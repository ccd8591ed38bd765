//! How far a bench has come.

use indicatif::{ProgressBar, ProgressStyle};

/// A bar of so many steps, with the time and what is measured just now.
pub fn bar(steps: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("{elapsed} {wide_bar} {pos}/{len}  {msg}");
    let bar = ProgressBar::new(steps as u64);
    match style {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}
