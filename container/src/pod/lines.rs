//! Lines that a program of the pod writes. It may write without an end, or what is no text.

use std::io;

use tokio::io::{AsyncBufRead, AsyncBufReadExt as _};

/// More bytes of a line are not kept.
const LONGEST: usize = 16 << 10;

/// The next line without its end, cut off after [`LONGEST`] bytes; none once all is read.
pub(super) async fn line(from: &mut (impl AsyncBufRead + Unpin)) -> io::Result<Option<String>> {
    let (mut line, mut ended, mut some) = (Vec::new(), false, false);
    while !ended {
        let bytes = from.fill_buf().await?;
        if bytes.is_empty() {
            break;
        }
        let end = bytes.iter().position(|byte| *byte == b'\n');
        let part = &bytes[..end.unwrap_or(bytes.len())];
        line.extend(part.iter().take(LONGEST - line.len()));
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
    async fn a_line_without_an_end_is_kept_in_part() {
        let long = "x".repeat(LONGEST * 3);
        let said = [b"one\n\n\xff\n", long.as_bytes(), b"\ntwo"].concat();
        let mut said = BufReader::new(&said[..]);
        let mut next = async || line(&mut said).await.unwrap();
        for is in ["one", "", "\u{fffd}", &long[..LONGEST], "two"] {
            assert_eq!(next().await.as_deref(), Some(is));
        }
        assert_eq!(next().await, None);
    }
}
