//! The console, which is the first serial port.

/// Prints a line.
macro_rules! say {
    ($($what:tt)*) => {{
        use std::io::Write as _;
        let mut console = std::io::stdout();
        // Nobody may be listening.
        write!(console, "windows: ").and_then(|()| writeln!(console, $($what)*)).ok();
        console.flush().ok();
    }};
}
pub(crate) use say;
