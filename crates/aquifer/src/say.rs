//! What commands print. Whoever reads it may go at any time (`aquifer status | head -1`): then what is under way goes on, and is undone or
//! finished as it would have been.

/// `print!`, without a panic when nobody reads.
macro_rules! say {
    ($($what:tt)*) => {{
        use std::io::Write;
        // There is nobody to tell.
        let _nobody_reads = write!(std::io::stdout(), $($what)*);
    }};
}

/// `println!`, likewise.
macro_rules! say_line {
    ($($what:tt)*) => {{
        use std::io::Write;
        let _nobody_reads = writeln!(std::io::stdout(), $($what)*);
    }};
}

pub(crate) use {say, say_line};
