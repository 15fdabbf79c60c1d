//! Reads lines that another program writes. Lines may be endless, or not text.

use std::io;

use tokio::io::{AsyncBufRead, AsyncBufReadExt as _};

/// Maximum bytes kept of a line.
const MAX_LENGTH: usize = 16 << 10;

/// Reads the next line without its end, cut off after [`MAX_LENGTH`] bytes; `None` at the end of
/// the stream.
pub(super) async fn line(from: &mut (impl AsyncBufRead + Unpin)) -> io::Result<Option<String>> {
    let (mut line, mut ended, mut some) = (Vec::new(), false, false);
    while !ended {
        let bytes = from.fill_buf().await?;
        if bytes.is_empty() {
            break;
        }
        let end = bytes.iter().position(|byte| *byte == b'\n');
        let part = &bytes[..end.unwrap_or(bytes.len())];
        line.extend(part.iter().take(MAX_LENGTH - line.len()));
        let count = part.len() + usize::from(end.is_some());
        from.consume(count);
        (ended, some) = (end.is_some(), true);
    }
    Ok(some.then(|| String::from_utf8_lossy(&line).into_owned()))
}

#[cfg(test)]
mod test {
    use tokio::io::BufReader;

    use super::*;

    #[tokio::test]
    async fn a_long_line_is_truncated() {
        let long = "x".repeat(MAX_LENGTH * 3);
        let said = [b"one\n\n\xff\n", long.as_bytes(), b"\ntwo"].concat();
        let mut said = BufReader::new(&said[..]);
        let mut next = async || line(&mut said).await.unwrap();
        for is in ["one", "", "\u{fffd}", &long[..MAX_LENGTH], "two"] {
            assert_eq!(next().await.as_deref(), Some(is));
        }
        assert_eq!(next().await, None);
    }
}
