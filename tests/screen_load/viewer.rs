//! A client that follows the protocol.

use anyhow::{Result, ensure};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::line::Line;

/// Encodings: Raw, ZRLE, Tight, and LastRect, which marks the end of an update.
pub(crate) const RAW: i32 = 0;
pub(crate) const ZRLE: i32 = 16;
pub(crate) const TIGHT: i32 = 7;
pub(crate) const LAST_RECT: i32 = -224;

/// A client after the handshake.
pub(crate) struct Viewer {
    pub(crate) line: Line,
    size: [u8; 4],
}

impl Viewer {
    /// Does the handshake.
    pub(crate) async fn new(mut line: Line) -> Result<Self> {
        let mut version = [0; 12];
        line.read_exact(&mut version).await?;
        ensure!(&version == b"RFB 003.008\n", "{}", version.escape_ascii());
        line.write_all(&version).await?;
        let mut types = [0; 2];
        line.read_exact(&mut types).await?;
        ensure!(types == [1, 1], "{types:?}");
        line.write_all(&[1]).await?;
        ensure!(line.read_u32().await? == 0, "refused");
        line.write_all(&[1]).await?;
        let mut size = [0; 4];
        line.read_exact(&mut size).await?;
        line.read_exact(&mut [0; 16]).await?;
        let mut name = vec![0; line.read_u32().await? as usize];
        line.read_exact(&mut name).await?;
        Ok(Self { line, size })
    }

    /// A client that requests and reads the picture as most viewers do.
    pub(crate) async fn good(line: Line) -> Result<Self> {
        let mut viewer = Self::new(line).await?;
        viewer.encodings(&[ZRLE, LAST_RECT]).await?;
        viewer.look(false).await?;
        Ok(viewer)
    }

    pub(crate) async fn encodings(&mut self, numbers: &[i32]) -> Result<()> {
        let mut out = vec![2, 0];
        out.extend(u16::try_from(numbers.len())?.to_be_bytes());
        numbers.iter().for_each(|number| out.extend(number.to_be_bytes()));
        Ok(self.line.write_all(&out).await?)
    }

    /// A request for the whole picture or, if `incremental`, for its changes.
    pub(crate) fn request(&self, incremental: bool) -> Vec<u8> {
        [&[3, u8::from(incremental), 0, 0, 0, 0][..], &self.size].concat()
    }

    /// Requests an update, and reads it. All rectangles must be ZRLE.
    pub(crate) async fn look(&mut self, incremental: bool) -> Result<()> {
        let ask = self.request(incremental);
        self.line.write_all(&ask).await?;
        let line = &mut self.line;
        ensure!(line.read_u16().await? == 0, "no update");
        let count = line.read_u16().await?;
        for _ in 0..count {
            line.read_u64().await?;
            let encoding = line.read_i32().await?;
            if encoding == LAST_RECT {
                break;
            }
            ensure!(encoding == ZRLE, "encoding {encoding}");
            let mut data = vec![0; line.read_u32().await? as usize];
            line.read_exact(&mut data).await?;
        }
        Ok(())
    }
}
