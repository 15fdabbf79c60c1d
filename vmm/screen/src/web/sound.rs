//! `/audio`: a WebSocket that sends what the guest plays, as binary messages of whole frames (48
//! kHz, 16 bits, stereo, little-endian). The reference image has the same.
//!
//! The sound comes from the screen: this is a VNC client of the stage that wants sound and no
//! pictures. A browser without sound thus costs what a viewer costs, and counts as one.
//!
//! Threats: a browser that reads slowly stops this client, which then loses sound. A machine that
//! an attacker took over sends at most [`MAX_BYTES`] at once.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex};
use tokio::time::timeout;

use super::line_socket::LineSocket;
use super::stage::{Stage, Viewer};
use crate::rfb::preferences::number;

/// Bytes between this client and the stage.
const BUFFER: usize = 16 << 10;
/// Maximum bytes of a message, and of the machine's name.
const MAX_BYTES: usize = 64 << 10;
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
const VERSION: &[u8; 12] = b"RFB 003.008\n";
const NO_SECURITY: u8 = 1;
/// The length of a `ServerInit` without the name.
const INIT_BYTES: usize = 24;
/// `SetEncodings` with one number.
const SET_ENCODINGS: [u8; 4] = [2, 0, 0, 1];
/// Sets 16 bits, signed, two channels and the rate. Then turns the sound on.
const START: [u8; 14] = [255, 1, 0, 2, 3, 2, 0, 0, 0xbb, 0x80, 255, 1, 0, 0];

/// Sends sound until the browser or the machine leaves.
pub(super) async fn serve(stage: Arc<dyn Stage>, peer: &str, mut socket: LineSocket) {
    let (near, far) = duplex(BUFFER);
    let viewer = Viewer { stream: Box::new(far), peer: format!("{peer}, sound"), view_only: true };
    let listen = async {
        if let Err(error) = listen(near, &mut socket).await {
            // Not a warning: clients choose how often this happens.
            tracing::debug!("web: {peer} hears nothing: {error:#}");
        }
        socket.close().await;
    };
    tokio::select! {
        () = stage.serve(viewer) => {}
        () = listen => {}
    }
}

async fn listen(mut line: DuplexStream, socket: &mut LineSocket) -> anyhow::Result<()> {
    timeout(HANDSHAKE_TIMEOUT, begin(&mut line)).await.context("no handshake")??;
    loop {
        tokio::select! {
            frames = next(&mut line) => {
                let frames = frames?;
                if !frames.is_empty() {
                    socket.send_bytes(frames).await?;
                }
            }
            // This is the end, so nothing is lost if a message was read in part.
            () = socket.disconnected() => return Ok(()),
        }
    }
}

/// Connects, and turns the sound on.
async fn begin(line: &mut DuplexStream) -> anyhow::Result<()> {
    line.read_exact(&mut [0; VERSION.len()]).await?;
    line.write_all(VERSION).await?;
    let mut kinds = vec![0; line.read_u8().await?.into()];
    line.read_exact(&mut kinds).await?;
    ensure!(kinds.contains(&NO_SECURITY), "the machine asks for a password");
    line.write_all(&[NO_SECURITY]).await?;
    ensure!(line.read_u32().await? == 0, "the machine refuses");
    // Others stay connected.
    line.write_all(&[1]).await?;
    let mut init = [0; INIT_BYTES];
    line.read_exact(&mut init).await?;
    let [.., a, b, c, d] = init;
    skip(line, u32::from_be_bytes([a, b, c, d])).await?;
    line.write_all(&SET_ENCODINGS).await?;
    line.write_i32(number::SOUND).await?;
    line.write_all(&START).await?;
    Ok(())
}

async fn skip(line: &mut DuplexStream, count: u32) -> anyhow::Result<()> {
    ensure!(count as usize <= MAX_BYTES, "{count} bytes: at most {MAX_BYTES}");
    let mut rest = line.take(count.into());
    let skipped = tokio::io::copy(&mut rest, &mut tokio::io::sink()).await?;
    ensure!(skipped == u64::from(count), "the machine is gone");
    Ok(())
}

/// Reads a message, and returns its frames, if it has any.
async fn next<R: AsyncRead + Unpin>(line: &mut R) -> anyhow::Result<Vec<u8>> {
    match line.read_u8().await? {
        // The machine confirms that it has sound. It has no reason to send pictures.
        0 => {
            line.read_u8().await?;
            for _ in 0..line.read_u16().await? {
                line.read_u64().await?;
                let number = line.read_i32().await?;
                ensure!(number == number::SOUND, "a rectangle of encoding {number}");
            }
            Ok(Vec::new())
        }
        255 => {
            let kind = line.read_u8().await?;
            ensure!(kind == 1, "a message {kind} of QEMU's extensions");
            let mut frames = Vec::new();
            if line.read_u16().await? == 2 {
                let count = line.read_u32().await? as usize;
                ensure!(count <= MAX_BYTES, "{count} bytes: at most {MAX_BYTES}");
                frames.resize(count, 0);
                line.read_exact(&mut frames).await?;
            }
            Ok(frames)
        }
        other => bail!("a message of type {other}"),
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[tokio::test]
    async fn messages_of_a_hostile_machine_are_bounded() {
        let good = [&[0, 0, 0, 1][..], &[0; 8], &number::SOUND.to_be_bytes()].concat();
        assert_eq!(next(&mut &good[..]).await.unwrap(), [0; 0]);
        let data = [255, 1, 0, 2, 0, 0, 0, 4, 1, 2, 3, 4, 5];
        assert_eq!(next(&mut &data[..]).await.unwrap(), [1, 2, 3, 4]);
        for bad in [
            &[0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7][..],
            &[255, 1, 0, 2, 0, 1, 0, 1],
            &[255, 1, 0, 2, 0, 0, 0, 4, 1, 2, 3],
            &[255, 2],
            &[3],
        ] {
            assert!(next(&mut &bad[..]).await.is_err(), "{bad:?}");
        }
    }
}
