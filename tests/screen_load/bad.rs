//! Badly behaved clients. Each runs until it is stopped, and reconnects after a disconnection.

use std::convert::Infallible;
use std::future::pending;
use std::io::Write as _;
use std::time::Duration;

use anyhow::{Result, bail};
use flate2::Compression;
use flate2::write::ZlibEncoder;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, split};
use tokio::time::sleep;

use crate::line::{Door, upgrade};
use crate::viewer::{LAST_RECT, RAW, TIGHT, Viewer, ZRLE};

/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(50);
/// Pseudo-encodings that the server answers: the extended clipboard, fences, continuous updates,
/// and others.
const EXTENSIONS: [i32; 8] = [LAST_RECT, -223, -308, -309, -312, -313, -316, -1_063_131_698];

/// One badly behaved client; `kind` selects its behavior.
pub(crate) async fn misbehave(kind: usize, door: Door) {
    loop {
        // How it ended does not matter.
        attempt(kind, &door).await.ok();
        sleep(PAUSE).await;
    }
}

async fn attempt(kind: usize, door: &Door) -> Result<Infallible> {
    match kind % 12 {
        0 => reads_slowly(door, &[RAW]).await,
        1 => reads_slowly(door, &[TIGHT]).await,
        2 => stalls(door).await,
        3 => stops_on_the_way(kind, door).await,
        4 => sends_noise(kind, door).await,
        5 => comes_and_goes(door).await,
        6 => wants_everything(door).await,
        7 => asks_without_end(door).await,
        8 => copies(door).await,
        9 => packs_bombs(door).await,
        10 => leaves_with_keys_down(door).await,
        _ => speaks_another_language(kind, door).await,
    }
}

/// Reads a few kB per second, without LastRect, so that the server cannot end an update early.
async fn reads_slowly(door: &Door, encodings: &[i32]) -> Result<Infallible> {
    let mut viewer = Viewer::new(door.enter().await?).await?;
    viewer.encodings(encodings).await?;
    let ask = viewer.request(false);
    viewer.line.write_all(&ask).await?;
    loop {
        if viewer.line.read(&mut [0; 256]).await? == 0 {
            bail!("gone");
        }
        sleep(Duration::from_millis(60)).await;
    }
}

/// Enables continuous updates, and reads nothing.
async fn stalls(door: &Door) -> Result<Infallible> {
    let mut viewer = Viewer::new(door.enter().await?).await?;
    viewer.encodings(&[&[TIGHT][..], &EXTENSIONS].concat()).await?;
    viewer.line.write_all(&[150, 1, 0, 0, 0, 0, 255, 255, 255, 255]).await?;
    pending().await
}

/// Begins a request or a handshake, and sends nothing more.
async fn stops_on_the_way(kind: usize, door: &Door) -> Result<Infallible> {
    let mut line = match (kind / 12 % 4, door.page().await?) {
        // HTTP; RFB where there is no HTTP.
        (0, Some(mut page)) => {
            page.write_all(b"GET / HTTP/1.1\r\nHost: ").await?;
            page
        }
        (1, Some(mut page)) => {
            let head = b"POST /login HTTP/1.1\r\nHost: a\r\nContent-Length: 4000\r\n\r\npass";
            page.write_all(head).await?;
            page
        }
        // TLS.
        (2, _) => {
            let mut line = door.knock().await?;
            line.write_all(&[0x16, 3, 1, 2, 0, 1, 0]).await?;
            line
        }
        _ => {
            let mut line = door.enter().await?;
            line.write_all(b"RFB 003.008\n\x01").await?;
            line
        }
    };
    line.flush().await?;
    while line.read(&mut [0; 64]).await? > 0 {}
    bail!("gone")
}

/// Sends random bytes that look like messages for a while.
async fn sends_noise(kind: usize, door: &Door) -> Result<Infallible> {
    const KINDS: [u8; 11] = [0, 2, 3, 4, 5, 6, 150, 248, 250, 251, 255];
    let mut viewer = Viewer::new(door.enter().await?).await?;
    let mut noise = u64::try_from(kind)?.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    loop {
        let mut bytes = Vec::new();
        for _ in 0..64 {
            noise ^= noise << 13;
            noise ^= noise >> 7;
            noise ^= noise << 17;
            let [which, count, rest @ ..] = noise.to_le_bytes();
            bytes.push(KINDS[usize::from(which) % KINDS.len()]);
            // Mostly zeros: lengths stay short, so that more messages pass before one is invalid.
            bytes.extend(rest.iter().take(usize::from(count % 7)).map(|byte| byte & 1));
            bytes.extend([0; 3]);
        }
        // Leave out message 250, which presses the machine's buttons.
        bytes.retain(|byte| *byte != 250);
        viewer.line.write_all(&bytes).await?;
        viewer.line.flush().await?;
    }
}

/// Disconnects in the middle of an update.
async fn comes_and_goes(door: &Door) -> Result<Infallible> {
    loop {
        let mut viewer = Viewer::new(door.enter().await?).await?;
        let ask = viewer.request(false);
        viewer.line.write_all(&ask).await?;
        viewer.line.flush().await?;
        sleep(Duration::from_millis(30)).await;
    }
}

/// Requests the whole picture without pause, and reads it.
async fn wants_everything(door: &Door) -> Result<Infallible> {
    let mut viewer = Viewer::new(door.enter().await?).await?;
    viewer.encodings(&[ZRLE, LAST_RECT]).await?;
    loop {
        viewer.look(false).await?;
    }
}

/// Sends requests, fences, formats and sizes, and reads no answers.
async fn asks_without_end(door: &Door) -> Result<Infallible> {
    let mut viewer = Viewer::new(door.enter().await?).await?;
    viewer.encodings(&[&[RAW][..], &EXTENSIONS].concat()).await?;
    let fence = [&[248, 0, 0, 0, 0x80, 0, 0, 7, 64][..], &[7; 64]].concat();
    let mapped = [0, 0, 0, 0, 8, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let size = [251, 0, 4, 0, 3, 0, 0, 0];
    let clipboard = [6, 0, 0, 0, 255, 255, 255, 252, 2, 0, 0, 1];
    let all = [&viewer.request(false)[..], &fence, &mapped, &size, &clipboard].concat().repeat(50);
    loop {
        viewer.line.write_all(&all).await?;
        viewer.line.flush().await?;
    }
}

/// Sends long clipboard texts, texts above the limit, and one that stops in the middle.
async fn copies(door: &Door) -> Result<Infallible> {
    let mut viewer = Viewer::new(door.enter().await?).await?;
    let text = |length: u32| [&[6, 0, 0, 0][..], &length.to_be_bytes()].concat();
    let mib = vec![b'\xe4'; 1 << 20];
    for round in 0..4 {
        viewer.line.write_all(&text((1 << 20) + 4096 * round)).await?;
        viewer.line.write_all(&mib).await?;
        viewer.line.write_all(&mib[..4096 * usize::try_from(round)?]).await?;
    }
    viewer.line.write_all(&text(1 << 20)).await?;
    viewer.line.write_all(&mib[1..]).await?;
    viewer.line.flush().await?;
    pending().await
}

/// Sends extended clipboard texts that decompress to a thousand times their length.
async fn packs_bombs(door: &Door) -> Result<Infallible> {
    let mut viewer = Viewer::new(door.enter().await?).await?;
    viewer.encodings(&[-1_063_131_698]).await?;
    let mut packed = ZlibEncoder::new(Vec::new(), Compression::best());
    packed.write_all(&(1_u32 << 20).to_be_bytes())?;
    packed.write_all(&vec![b'x'; 8 << 20])?;
    let body = [&0x1000_0001_u32.to_be_bytes()[..], &packed.finish()?].concat();
    let length = -i32::try_from(body.len())?;
    let message = [&[6, 0, 0, 0][..], &length.to_be_bytes(), &body].concat();
    loop {
        viewer.line.write_all(&message).await?;
        viewer.line.flush().await?;
    }
}

/// Presses Shift, Control, Alt and a mouse button, and disconnects.
async fn leaves_with_keys_down(door: &Door) -> Result<Infallible> {
    let mut viewer = Viewer::new(door.enter().await?).await?;
    for key in [0xe1, 0xe3, 0xe9] {
        viewer.line.write_all(&[4, 1, 0, 0, 0, 0, 0xff, key]).await?;
    }
    for at in 0..=255 {
        viewer.line.write_all(&[5, 1, 1, at, 0, at]).await?;
    }
    viewer.line.flush().await?;
    bail!("and away")
}

/// Sends HTTP to the VNC port, and floods the web port with small or invalid WebSocket frames.
async fn speaks_another_language(kind: usize, door: &Door) -> Result<Infallible> {
    let Some(mut page) = door.page().await? else {
        let mut line = door.enter().await?;
        line.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").await?;
        while line.read(&mut [0; 4096]).await? > 0 {}
        bail!("gone");
    };
    let Door::Web(place) = door else { bail!("no page") };
    // Empty pings, continuations without a start, a frame of enormous length, and HTTP with a path
    // that leads out of the folder.
    let frame: &[u8] = match kind / 12 % 4 {
        0 => &[0x89, 0x80, 0, 0, 0, 0],
        1 => &[0x00, 0x80, 0, 0, 0, 0],
        2 => &[0x82, 0xff, 0, 0, 0, 0, 0x7f, 0xff, 0xff, 0xff, 0, 0, 0, 0],
        _ => b"GET /files/../../etc/passwd HTTP/1.1\r\nHost: a\r\n\r\n",
    };
    if kind / 12 % 4 < 3 {
        page.write_all(upgrade(place).as_bytes()).await?;
        page.flush().await?;
        page.read_exact(&mut [0; 64]).await?;
    }
    let (mut reader, mut writer) = split(page);
    let flood = async {
        let frames = frame.repeat(200);
        while writer.write_all(&frames).await.is_ok() && writer.flush().await.is_ok() {}
    };
    let drain = async { while reader.read(&mut [0; 4096]).await.is_ok_and(|it| it > 0) {} };
    tokio::select! { () = flood => {} () = drain => {} }
    bail!("gone")
}
