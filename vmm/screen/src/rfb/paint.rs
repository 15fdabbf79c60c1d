//! Sends updates to one client, one after another.
//!
//! An update consists of the tiles that are dirty when it begins, so a guest that draws all the
//! time cannot make it endless. It is encoded and written in parts of [`CHUNK`] pixels, which
//! limits the memory that a slow client occupies. An update begins with its number of rectangles.
//! Clients that support LastRect do not need the number. For others the rectangles are counted in
//! advance. This is impossible only for Tight, where the number depends on the pixels. Those
//! clients get each update as a whole, and share one budget of memory for this.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::Context;
use host::input::Lights;
use tokio::io::{AsyncWrite, AsyncWriteExt as _};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use super::canvas::Canvas;
use super::encode::{self, Encoder, Encoding, Parameters};
use super::format::PixelFormat;
use super::pending::PendingUpdate;
use super::picture::{Area, Move, View};
use super::preferences::{Pointer, number};
use super::session::{Report, State, milestone};
use super::tiles::Tiles;
use super::{BUDGET, Client, Server};

/// Maximum pixels per part. A row of tiles may be a little more. Without compression this is 1 MiB.
pub const CHUNK: usize = 1 << 18;
/// Updates with at most this many pixels are encoded on the current thread, because a switch would
/// cost more.
const SMALL_JOB: usize = 1 << 13;
/// A client that accepts no data for this long is disconnected.
pub(super) const STALL: Duration = Duration::from_secs(30);
/// Bytes that a client must accept within `STALL`.
pub(super) const PIECE: usize = 64 << 10;
/// How long an update waits for memory from the budget, before it is sent in Raw, which needs none.
const PATIENCE: Duration = Duration::from_secs(2);
/// Capacity that a buffer keeps between two updates.
const KEPT_CAPACITY: usize = 64 << 10;
/// Pieces in which black areas are encoded. Each has `CHUNK` pixels.
const BLACK_PIECE: (u16, u16) = (2048, 128);
/// If nothing changed for this long, tiles of reduced quality are sent again.
const SETTLED: Duration = Duration::from_millis(300);

/// Area of rectangles whose content is not a part of the picture.
const NO_AREA: Area = Area { x: 0, y: 0, width: 0, height: 0 };
const ONE_PIXEL: Area = Area { width: 1, height: 1, ..NO_AREA };

pub(super) struct Painter {
    server: Arc<Server>,
    client: Arc<Client>,
    encoder: Option<Encoder>,
    out: Vec<u8>,
    known: Known,
    /// Tiles that were sent with less quality than the client asked for.
    coarse: Tiles,
    last: Instant,
}

/// State that the client already knows.
struct Known {
    size: (u16, u16),
    /// Actual size of the picture. It differs from `size` if the client cannot be resized.
    picture_size: (u16, u16),
    codes: bool,
    sound: bool,
    buttons: bool,
    name: bool,
    pointer: bool,
    lights: Option<Lights>,
}

#[derive(Default)]
struct Plan {
    /// Messages and updates without pixels.
    first: Vec<u8>,
    /// Rectangles without pixels, to be sent before those with pixels.
    pseudo: PseudoRectangles,
    job: Option<Job>,
}

/// Encoded rectangles without pixels: changes of the client's state, and moves.
#[derive(Default)]
struct PseudoRectangles {
    bytes: Vec<u8>,
    count: u16,
}

impl PseudoRectangles {
    fn add(&mut self, area: Area, number: i32, data: &[u8]) {
        rectangle(area, number, &mut self.bytes);
        self.bytes.extend(data);
        self.count += 1;
    }
}

/// Pixels of an update.
struct Job {
    tiles: Tiles,
    parameters: Parameters,
    format: PixelFormat,
    /// Size of the picture as the client knows it.
    clip: (u16, u16),
    /// Areas that the client sees and the picture no longer covers. They are sent in black.
    rest: Vec<Area>,
    /// The client may have the pixels already. Updates with new pixels come first.
    repeated: bool,
    last_rect: bool,
    fence: bool,
}

/// How a client finds the end of an update.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    /// A LastRect rectangle follows the last one.
    LastRect,
    /// The number of rectangles was counted in advance.
    Counted(u16),
    /// The whole update is encoded before its number of rectangles is written.
    Buffered,
}

struct Part {
    job: Job,
    encoder: Encoder,
    out: Vec<u8>,
    rectangles: usize,
}

impl Painter {
    pub(super) fn new(server: Arc<Server>, client: Arc<Client>, size: (u16, u16)) -> Self {
        Self {
            server,
            client,
            encoder: Some(Encoder::new()),
            out: Vec::new(),
            known: Known {
                size,
                picture_size: size,
                codes: false,
                sound: false,
                buttons: false,
                name: false,
                pointer: false,
                lights: None,
            },
            coarse: Tiles::none(size.0, size.1),
            last: Instant::now(),
        }
    }

    pub(super) async fn run<W: AsyncWrite + Unpin>(mut self, mut writer: W) -> anyhow::Result<()> {
        loop {
            if self.client.state(|state| std::mem::take(&mut state.refresh)) {
                // A client that always requests the whole picture never waits for changes.
                self.server.canvas.refresh(&self.client.viewer).await;
            }
            let plan = self.plan();
            if plan.first.is_empty() && plan.pseudo.count == 0 && plan.job.is_none() {
                self.wait().await;
                continue;
            }
            if !plan.first.is_empty() {
                self.write(&mut writer, &plan.first).await?;
                self.client.room.notify_one();
            }
            match plan.job {
                Some(job) => self.update(&mut writer, job, plan.pseudo).await?,
                None if plan.pseudo.count > 0 => {
                    let mut message = header(plan.pseudo.count);
                    message.extend(plan.pseudo.bytes);
                    self.write(&mut writer, &message).await?;
                }
                None => {}
            }
            // TLS and WebSockets hold data back until they are flushed.
            timeout(STALL, writer.flush()).await.context("it stopped reading")??;
        }
    }

    async fn wait(&self) {
        let wake = self.client.viewer.wake.notified();
        if self.coarse.is_empty() {
            return wake.await;
        }
        timeout(SETTLED, wake).await.ok();
    }

    /// Decides what to send, and removes it from the client's pending changes.
    fn plan(&mut self) -> Plan {
        let (client, canvas) = (self.client.clone(), self.server.canvas.clone());
        let lights = canvas.lights();
        // The order of locks is always picture, state, tiles. The picture is not locked here,
        // because scans hold that lock for a while. The size of the tiles is the size of the
        // picture.
        client.state(|state| {
            client.viewer.pending(|pending| {
                let mut plan =
                    Plan { first: std::mem::take(&mut state.replies), ..Plan::default() };
                client.sound().write(&mut plan.first);
                let size = pending.dirty().size();
                self.resize(size, state, &mut plan);
                pending.set_copies(state.preferences.features.copy && self.known.size == size);
                self.pseudo_rectangles(lights, state, &mut plan.pseudo);
                self.pixels(pending, state, &mut plan);
                self.pointer(state, &mut plan);
                let asks = plan.job.is_none() && state.request.is_some();
                canvas.wait(&client.viewer, asks || is_streaming(state));
                plan
            })
        })
    }

    /// Announces a new size, and replies to requests for one.
    fn resize(&mut self, size: (u16, u16), state: &mut State, plan: &mut Plan) {
        let features = &state.preferences.features;
        if size != self.known.size {
            if features.screens {
                let report = Report { reason: 0, status: 0 };
                if !state.reports.contains(&report) {
                    state.reports.push_back(report);
                }
            } else if features.resize {
                plan.first.extend(header(1));
                let (width, height) = size;
                rectangle(Area { x: 0, y: 0, width, height }, number::RESIZE, &mut plan.first);
            } else {
                return;
            }
            self.known.picture_size = size;
            // A client that waits for the whole picture now waits for the whole new picture.
            let whole = |area: &mut Area| {
                let covers = (area.x, area.y) == (0, 0) && area.width >= self.known.size.0;
                if covers && area.height >= self.known.size.1 {
                    (area.width, area.height) = size;
                }
            };
            state.request.as_mut().map(whole);
            state.continuous.as_mut().map(whole);
            self.known.size = size;
            self.coarse = Tiles::none(size.0, size.1);
        }
        while let Some(report) = state.reports.pop_front() {
            plan.first.extend(header(1));
            screens(report, size, &mut plan.first);
        }
    }

    /// Sends other state that changed, to clients that support it.
    fn pseudo_rectangles(
        &mut self,
        lights: Option<Lights>,
        state: &mut State,
        out: &mut PseudoRectangles,
    ) {
        let (features, known, name) =
            (&state.preferences.features, &mut self.known, &self.client.rules.name);
        let mut add = |x: u16, number: i32, data: &[u8]| {
            out.add(Area { x, ..NO_AREA }, number, data);
        };
        if features.codes && !std::mem::replace(&mut known.codes, features.codes) {
            add(0, number::CODES, &[]);
        }
        let sound = state.preferences.sound && self.server.interfaces.sound.has_card();
        if sound && !std::mem::replace(&mut known.sound, true) {
            add(0, number::SOUND, &[]);
        }
        if features.buttons && !std::mem::replace(&mut known.buttons, features.buttons) {
            add(0, number::BUTTONS, &[]);
        }
        if features.name && !std::mem::replace(&mut known.name, features.name) {
            let length = u32::try_from(name.len()).unwrap_or(0).to_be_bytes();
            add(0, number::NAME, &[&length[..], name.as_bytes()].concat());
        }
        if features.motion && state.relative != state.announced_relative {
            state.announced_relative = state.relative;
            add(u16::from(!state.relative), number::MOTION, &[]);
        }
        if (features.lights || features.vmware_lights)
            && let Some(now) = lights.filter(|now| known.lights != Some(*now))
        {
            known.lights = Some(now);
            let bits = u8::from(now.scroll) | u8::from(now.num) << 1 | u8::from(now.caps) << 2;
            if features.lights {
                add(0, number::LIGHTS, &[bits]);
            } else {
                add(0, number::VMWARE_LIGHTS, &u32::from(bits).to_be_bytes());
            }
        }
    }

    /// Makes the client's pointer invisible, because the guest's pointer is part of the picture.
    /// The image is one transparent pixel. An empty image would not work: LibVNC does not report it
    /// to its programs, gtk-vnc treats it as no image at all, and vncdotool fails. The pixel has
    /// the client's current format, like those of the same update.
    fn pointer(&mut self, state: &State, plan: &mut Plan) {
        let Some(kind) = state.preferences.features.pointer.filter(|_| plan.job.is_some()) else {
            return;
        };
        if std::mem::replace(&mut self.known.pointer, true) {
            return;
        }
        let (number, pixel) = match kind {
            // A pixel and its mask.
            Pointer::Masked => (number::CURSOR, vec![0; state.format.bytes() + 1]),
            // The number of Raw, and a pixel in the format of this encoding.
            Pointer::Alpha => (number::ALPHA_CURSOR, vec![0; 8]),
        };
        plan.pseudo.add(ONE_PIXEL, number, &pixel);
    }

    /// Takes the tiles that the client waits for.
    fn pixels(&mut self, pending: &mut PendingUpdate, state: &mut State, plan: &mut Plan) {
        let streams = is_streaming(state);
        let requested = match (state.request, state.continuous.filter(|_| streams)) {
            (Some(one), Some(_)) | (Some(one), None) => one,
            (None, Some(area)) => area,
            (None, None) => return,
        };
        let slow = state.rate.slow;
        let (moves, tiles) = pending.take(requested);
        let mut job = Job {
            tiles,
            parameters: state.preferences.parameters(slow),
            format: state.format,
            clip: self.known.size,
            rest: Vec::new(),
            repeated: state.repeated,
            last_rect: state.preferences.features.last_rect,
            fence: state.preferences.features.fence,
        };
        if job.tiles.size() != std::mem::replace(&mut self.known.picture_size, job.tiles.size()) {
            job.rest = outside(job.clip, self.known.picture_size);
        }
        let same = job.tiles.size() == self.coarse.size();
        if !same {
            self.coarse = Tiles::none(job.tiles.size().0, job.tiles.size().1);
        }
        self.moves(&moves, plan);
        if job.tiles.is_empty() && moves.is_empty() {
            if self.coarse.is_empty() || self.last.elapsed() < SETTLED {
                return;
            }
            job.tiles = self.coarse.split_off(requested);
            if job.tiles.is_empty() {
                return;
            }
            pending.set_in_flight(&job.tiles);
            job.parameters = state.preferences.parameters(0);
        } else if slow > 0 && job.parameters.quality.is_some() {
            self.coarse.unite(&job.tiles);
        } else {
            self.coarse.subtract(&job.tiles);
        }
        (state.request, state.repeated) = (None, false);
        plan.job = Some(job);
    }

    /// Adds moves, which precede all pixels. Moved tiles may be of reduced quality.
    fn moves(&mut self, moves: &[Move], plan: &mut Plan) {
        for it in moves {
            encode::copy(it.to, it.from.0, it.from.1, &mut plan.pseudo.bytes);
            plan.pseudo.count += 1;
            let before = self.coarse.clone();
            it.apply(&before, &mut self.coarse);
        }
    }

    async fn update<W: AsyncWrite + Unpin>(
        &mut self,
        writer: &mut W,
        mut job: Job,
        pseudo: PseudoRectangles,
    ) -> anyhow::Result<()> {
        let fence = job.fence;
        let number = self.client.state(|state| state.rate.sending());
        let (end, _budget) = self.end(&mut job, pseudo.count).await;
        let mut rectangles = usize::from(pseudo.count);
        let (mut bytes, mut open) = (0, false);
        let mut message = std::mem::take(&mut self.out);
        message.extend(header(0));
        message.extend(pseudo.bytes);
        while !job.is_done() {
            let part = self.encode(job, message).await?;
            (job, message) = (part.job, part.out);
            self.client.viewer.pending(|pending| pending.set_in_flight(&job.tiles));
            rectangles += part.rectangles;
            self.encoder = Some(part.encoder);
            if end != End::Buffered && !job.is_done() {
                if !std::mem::replace(&mut open, true) {
                    let count = if let End::Counted(count) = end { count } else { u16::MAX };
                    message[2..4].copy_from_slice(&count.to_be_bytes());
                }
                self.write(writer, &message).await?;
                bytes += message.len();
                message.clear();
            }
        }
        match end {
            End::LastRect if open => rectangle(NO_AREA, number::LAST_RECT, &mut message),
            // The mode has changed meanwhile. The new picture follows in the next update.
            End::Counted(count) if open => {
                (rectangles..count.into()).for_each(|_| pixel(&job.format, &mut message));
            }
            _ => {
                let count = u16::try_from(rectangles).context("too many rectangles")?;
                message[2..4].copy_from_slice(&count.to_be_bytes());
            }
        }
        bytes += message.len();
        if fence {
            milestone(number, &mut message);
        }
        self.client.state(|state| state.rate.sent(number, bytes));
        self.write(writer, &message).await?;
        message.clear();
        message.shrink_to(KEPT_CAPACITY);
        self.out = message;
        self.last = Instant::now();
        if !fence {
            self.client.state(|state| {
                if state.continuous.is_some() {
                    state.rate.arrived(number, Instant::now());
                }
            });
        }
        Ok(())
    }

    /// Decides how the client will find the end of an update, which has `more` rectangles besides
    /// those of its pixels. Also returns the permit for memory from the budget, if the update needs
    /// any.
    async fn end(&self, job: &mut Job, more: u16) -> (End, Option<OwnedSemaphorePermit>) {
        if job.last_rect {
            return (End::LastRect, None);
        }
        let counted = |job: &Job| {
            let count = job.rectangles()?.checked_add(more.into())?;
            u16::try_from(count).ok().map(End::Counted)
        };
        if let Some(end) = counted(job) {
            return (end, None);
        }
        let pixels = job.tiles.pixels();
        if pixels <= CHUNK {
            return (End::Buffered, None);
        }
        let kib = u32::try_from((pixels * 4).div_ceil(1 << 10).min(BUDGET)).unwrap_or(u32::MAX);
        let budget = self.server.budget.clone().acquire_many_owned(kib);
        if let Ok(Ok(budget)) = timeout(PATIENCE, budget).await {
            return (End::Buffered, Some(budget));
        }
        // Every client supports Raw, and its rectangles can be counted.
        job.parameters.encoding = Encoding::Raw;
        (counted(job).unwrap_or(End::Buffered), None)
    }

    /// Encodes the next part of a job and appends it to `out`.
    async fn encode(&mut self, job: Job, out: Vec<u8>) -> anyhow::Result<Part> {
        let encoder = self.encoder.take().context("an encoder was lost")?;
        let part = Part { job, encoder, out, rectangles: 0 };
        let canvas = self.server.canvas.clone();
        if part.job.rest.is_empty() && part.job.tiles.pixels() <= SMALL_JOB {
            return Ok(part.encode(&canvas));
        }
        let turn = async |turns: &Arc<Semaphore>| turns.clone().acquire_owned().await;
        let repeats =
            if part.job.repeated { Some(turn(&self.server.repeats).await?) } else { None };
        let turn = turn(&self.server.encoders).await?;
        let encode = move || {
            // Keep the permits until encoding ends, even if the client disconnects.
            let _turns = (turn, repeats);
            part.encode(&canvas)
        };
        tokio::task::spawn_blocking(encode).await.context("an encoder panicked")
    }

    /// Writes all bytes, unless the client stalls.
    async fn write<W: AsyncWrite + Unpin>(
        &self,
        writer: &mut W,
        bytes: &[u8],
    ) -> anyhow::Result<()> {
        for piece in bytes.chunks(PIECE) {
            let write = timeout(STALL, writer.write_all(piece)).await;
            write.context("it stopped reading")??;
            self.client.sent.fetch_add(piece.len() as u64, Ordering::Relaxed);
        }
        Ok(())
    }
}

impl Job {
    fn is_done(&self) -> bool {
        self.rest.is_empty() && self.tiles.is_empty()
    }

    /// Number of rectangles, unless it depends on the pixels.
    fn rectangles(&self) -> Option<usize> {
        let count = |area: &Area| self.parameters.encoding.rectangles(&self.format, *area);
        let sum = |areas: &[Area]| areas.iter().map(count).sum::<Option<usize>>();
        let (mut tiles, mut all) = (self.tiles.clone(), sum(&self.rest)?);
        while !tiles.is_empty() {
            all += sum(&next(&mut tiles, self.clip))?;
        }
        Some(all)
    }
}

/// Takes the next part of a picture, clipped to the size that the client knows.
fn next(tiles: &mut Tiles, size: (u16, u16)) -> Vec<Area> {
    let mut areas = Vec::new();
    tiles.take(CHUNK, &mut areas);
    let clip = |start: u16, length: u16, most: u16| length.min(most.saturating_sub(start));
    for area in &mut areas {
        area.width = clip(area.x, area.width, size.0);
        area.height = clip(area.y, area.height, size.1);
    }
    areas.retain(|area| !area.is_empty());
    areas
}

impl Part {
    fn encode(mut self, canvas: &Canvas) -> Self {
        if let Some(area) = self.job.rest.pop() {
            // With a stride of 0, one row serves as all rows.
            let black = vec![0; usize::from(area.x) + usize::from(area.width)];
            self.add(&View { pixels: &black, stride: 0, area });
            return self;
        }
        canvas.with_picture(|picture| {
            if picture.size() != self.job.tiles.size() {
                // All of the new picture is dirty for the next update.
                self.job.tiles = Tiles::none(0, 0);
                return;
            }
            let stride = usize::from(picture.width);
            for area in next(&mut self.job.tiles, self.job.clip) {
                self.add(&View { pixels: &picture.pixels, stride, area });
            }
        });
        self
    }

    fn add(&mut self, view: &View<'_>) {
        let Self { job, encoder, out, rectangles } = self;
        *rectangles += encoder.encode(&job.parameters, &job.format, view, out);
    }
}

/// Areas that the client sees and a smaller picture no longer covers.
fn outside(client: (u16, u16), picture: (u16, u16)) -> Vec<Area> {
    let (right, bottom) = (client.0.saturating_sub(picture.0), client.1.saturating_sub(picture.1));
    let beside = Area { x: picture.0, y: 0, width: right, height: client.1 };
    let below = Area { x: 0, y: picture.1, width: client.0 - right, height: bottom };
    [beside, below].into_iter().flat_map(|it| it.pieces(BLACK_PIECE.0, BLACK_PIECE.1)).collect()
}

/// Whether changes are sent without requests, and the connection has room for more.
fn is_streaming(state: &State) -> bool {
    state.continuous.is_some() && state.rate.is_open()
}

/// Header of a `FramebufferUpdate`.
fn header(rectangles: u16) -> Vec<u8> {
    let mut out = vec![0, 0];
    out.extend(rectangles.to_be_bytes());
    out
}

/// A rectangle that changes as little as possible: a black pixel in the corner.
fn pixel(format: &PixelFormat, out: &mut Vec<u8>) {
    rectangle(ONE_PIXEL, Encoding::Raw.number(), out);
    out.extend(std::iter::repeat_n(0, format.bytes()));
}

/// A rectangle's header.
fn rectangle(area: Area, encoding: i32, out: &mut Vec<u8>) {
    for part in [area.x, area.y, area.width, area.height] {
        out.extend(part.to_be_bytes());
    }
    out.extend(encoding.to_be_bytes());
}

/// `ExtendedDesktopSize` with our single screen.
fn screens(report: Report, size: (u16, u16), out: &mut Vec<u8>) {
    // The fields of the position have another meaning here.
    let (x, y, (width, height)) = (report.reason, report.status, size);
    rectangle(Area { x, y, width, height }, number::SCREENS, out);
    out.extend([1, 0, 0, 0]);
    // The screen's number. LibVNC treats 0 as no screen, and then requests no sizes.
    out.extend(1_u32.to_be_bytes());
    out.extend([0, 0, size.0, size.1].into_iter().flat_map(u16::to_be_bytes));
    out.extend(0_u32.to_be_bytes());
}
