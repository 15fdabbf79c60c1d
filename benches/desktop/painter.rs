//! Plays the scenes on an X server. The pictures are in the server's memory, as the probe's are in
//! the guest's: drawing a frame is one copy there, so that no half of it is sent.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use transom_benches::pictures::Picture;

use crate::Player;
use crate::show::{LAST, SCENES, SIZE, Show};

/// Requests of the X protocol.
const CREATE_WINDOW: u8 = 1;
const MAP_WINDOW: u8 = 8;
const GET_INPUT_FOCUS: u8 = 43;
const CREATE_PIXMAP: u8 = 53;
const CREATE_GC: u8 = 55;
const COPY_AREA: u8 = 62;
const PUT_IMAGE: u8 = 72;
/// Kinds of messages of the server.
const ERROR: u8 = 0;
const REPLY: u8 = 1;
/// Whole pixels, one after another.
const Z_PIXMAP: u8 = 2;
const DEPTH: u8 = 24;
/// Bits of a value's presence: no window manager, and no events about copies.
const OVERRIDE_REDIRECT: u32 = 1 << 9;
const GRAPHICS_EXPOSURES: u32 = 1 << 16;
/// Lines of a picture in one request, which has a limited size.
const STRIP: u16 = 40;

pub(crate) struct Painter {
    orders: Sender<u8>,
    drawn: Receiver<Result<f64>>,
}

impl Painter {
    pub(crate) fn new(display: &str, show: &Show) -> Result<Self> {
        let mut window = Window::open(display)?;
        let scenes = show.0.iter().map(|pictures| {
            pictures.iter().map(|picture| window.upload(picture)).collect::<Result<_>>()
        });
        let scenes: Vec<Vec<u32>> = scenes.collect::<Result<_>>()?;
        let (orders, ordered) = channel();
        let (answers, drawn) = channel();
        // It ends with the sender of its orders.
        thread::spawn(move || {
            let (mut scene, mut before) = (LAST, None);
            loop {
                let pixmaps = &scenes[usize::from(scene)];
                // The answer is sent when the first frame is on the screen.
                let shown = window.draw(pixmaps[0]).map(|()| before.unwrap_or(0.0));
                if before.is_some() && answers.send(shown).is_err() {
                    return;
                }
                match window.play(pixmaps, scene, &ordered) {
                    Ok((Some(next), frames)) => (scene, before) = (next, Some(frames)),
                    Ok((None, _)) => return,
                    Err(error) => {
                        answers.send(Err(error)).ok();
                        return;
                    }
                }
            }
        });
        Ok(Self { orders, drawn })
    }
}

impl Player for Painter {
    fn play(&mut self, scene: u8) -> Result<f64> {
        self.orders.send(scene)?;
        self.drawn.recv()?
    }
}

/// A window over the whole screen, without a border.
struct Window {
    server: UnixStream,
    window: u32,
    context: u32,
    next: u32,
}

impl Window {
    fn open(display: &str) -> Result<Self> {
        let path = format!("/tmp/.X11-unix/X{}", display.trim_start_matches(':'));
        let mut server = UnixStream::connect(&path).context(path)?;
        // Little endian, version 11, and no name or data of an authorization.
        server.write_all(&[b'l', 0, 11, 0, 0, 0, 0, 0, 0, 0, 0, 0])?;
        let mut head = [0; 8];
        server.read_exact(&mut head)?;
        let length = 4 * usize::from(u16::from_le_bytes([head[6], head[7]]));
        let mut body = vec![0; length];
        server.read_exact(&mut body)?;
        ensure!(head[0] == 1, "the X server refuses: {}", String::from_utf8_lossy(&body));
        let word = |at: usize| {
            let bytes =
                body.get(at..at + 4).and_then(|it| it.first_chunk()).context("X's reply")?;
            anyhow::Ok(u32::from_le_bytes(*bytes))
        };
        // The screen follows the vendor's name, which is padded, and the formats of pictures.
        let (base, vendor) = (word(4)?, word(16)? as usize & 0xffff);
        let formats = usize::from(body[21]);
        let root = word(32 + vendor.next_multiple_of(4) + 8 * formats)?;
        let mut it = Self { server, window: base, context: base + 1, next: base + 2 };
        let [width, height] = [SIZE.0, SIZE.1].map(u32::from);
        let (place, visual) = (0, 0);
        let [window, context] = [it.window, it.context];
        let size = height << 16 | width;
        it.ask(
            [CREATE_WINDOW, 0],
            &[window, root, place, size, 0, visual, OVERRIDE_REDIRECT, 1],
            &[],
        )?;
        it.ask([MAP_WINDOW, 0], &[window], &[])?;
        it.ask([CREATE_GC, 0], &[context, window, GRAPHICS_EXPOSURES, 0], &[])?;
        it.sync()?;
        Ok(it)
    }

    /// Sends a request: its code and a detail, fields, and a picture.
    fn ask(&mut self, [code, detail]: [u8; 2], words: &[u32], pixels: &[u32]) -> Result<()> {
        let length = u16::try_from(1 + words.len() + pixels.len())?.to_le_bytes();
        let mut bytes = vec![code, detail, length[0], length[1]];
        bytes.extend(words.iter().chain(pixels).flat_map(|word| word.to_le_bytes()));
        self.server.write_all(&bytes).context("the X server")
    }

    /// Waits until the server has done everything.
    fn sync(&mut self) -> Result<()> {
        self.ask([GET_INPUT_FOCUS, 0], &[], &[])?;
        let mut reply = [u8::MAX; 32];
        // Events such as a new keyboard layout are sent to all clients.
        while reply[0] != REPLY {
            self.server.read_exact(&mut reply)?;
            ensure!(reply[0] != ERROR, "X refuses request {}: error {}", reply[10], reply[1]);
        }
        Ok(())
    }

    /// Makes the server keep a picture.
    fn upload(&mut self, picture: &Picture) -> Result<u32> {
        let (pixmap, context, window) = (self.next, self.context, self.window);
        self.next += 1;
        let [width, height, strip] = [picture.width, picture.height, STRIP].map(u32::from);
        self.ask([CREATE_PIXMAP, DEPTH], &[pixmap, window, height << 16 | width], &[])?;
        let line = usize::from(picture.width);
        for (at, pixels) in (0..).zip(picture.pixels.chunks(line * usize::from(STRIP))) {
            let size = strip << 16 | width;
            let place = (at * strip) << 16;
            let words = [pixmap, context, size, place, u32::from(DEPTH) << 8];
            self.ask([PUT_IMAGE, Z_PIXMAP], &words, pixels)?;
        }
        self.sync()?;
        Ok(pixmap)
    }

    /// Puts a picture on the screen.
    fn draw(&mut self, pixmap: u32) -> Result<()> {
        let [width, height] = [SIZE.0, SIZE.1].map(u32::from);
        let words = [pixmap, self.window, self.context, 0, 0, height << 16 | width];
        self.ask([COPY_AREA, 0], &words, &[])?;
        self.sync()
    }

    /// Draws frames until another scene is ordered, which is returned with their number. The first
    /// one is on the screen. A frame that is late delays the others.
    fn play(
        &mut self,
        pixmaps: &[u32],
        scene: u8,
        orders: &Receiver<u8>,
    ) -> Result<(Option<u8>, f64)> {
        let rate = SCENES.iter().find(|it| it.number == scene).map(|it| it.rate);
        let period = rate.map_or(Duration::from_secs(3600), |rate| Duration::from_secs(1) / rate);
        let (mut frames, mut due) = (1.0, Instant::now());
        for pixmap in pixmaps.iter().cycle().skip(1) {
            due = (due + period).max(Instant::now());
            match orders.recv_timeout(due.saturating_duration_since(Instant::now())) {
                Ok(next) => return Ok((Some(next), frames)),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            self.draw(*pixmap)?;
            frames += 1.0;
        }
        Ok((None, frames))
    }
}
