//! Reads a client's messages and acts on them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::task::yield_now;

use super::clipboard::{self, ClipboardMessage, Text};
use super::format::PixelFormat;
use super::input::{ClientInput, PointerEvent};
use super::message::{self, Message, Screen, SoundRequest};
use super::picture::Area;
use super::preferences::Preferences;
use super::rate::Rate;
use super::security::Access;
use super::{Client, Power, Server, keys};
use crate::keys::translate::Source;

/// Maximum bytes of pending replies. A client that does not read them is not read any further.
const MAX_REPLY_BYTES: usize = 64 << 10;
/// Maximum pending replies to resize requests.
const MAX_REPORTS: usize = 16;
const READ_SIZE: usize = 16 << 10;
/// Messages that are handled before other tasks get a turn.
const MAX_BATCH: usize = 64;
/// Maximum presses of the machine's buttons, and the time in which they count.
const MAX_PRESSES: (u32, Duration) = (4, Duration::from_secs(1));
/// How long to wait for a guest that reads no keys, before keys are dropped.
const PATIENCE: Duration = Duration::from_secs(10);
/// Maximum width and height that a client may request.
const MAX_SIDE: u16 = 8192;

/// `EndOfContinuousUpdates`
const END_OF_CONTINUOUS: u8 = 150;
/// Request: the peer must reply to this fence.
const FENCE_REQUEST: u32 = 1 << 31;
/// SyncNext: the reply must go out together with the effects of the next message.
const FENCE_SYNC_NEXT: u32 = 1 << 2;
/// Flags that a reply may carry.
const FENCE_KNOWN: u32 = 0b111;

/// Content of an `ExtendedDesktopSize` rectangle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Report {
    /// 0: the server changed the size, or the client asked for it. 1: this client requested a size.
    pub reason: u16,
    /// 0: no error. 1: prohibited. 3: invalid screen layout. 4: the request was forwarded to the
    /// guest.
    pub status: u16,
}

/// State shared between the reader and the writer of one client.
pub(super) struct State {
    pub format: PixelFormat,
    pub preferences: Preferences,
    /// Area of the pending update request.
    pub request: Option<Area>,
    pub continuous: Option<Area>,
    /// The pending update may contain pixels that the client already has, or that are not new.
    pub repeated: bool,
    /// A non-incremental request is pending: the picture must be refreshed before it is answered.
    pub refresh: bool,
    /// Messages to be sent before the next update.
    pub replies: Vec<u8>,
    pub reports: VecDeque<Report>,
    /// The pointer is relative: clients should send movements instead of positions.
    pub relative: bool,
    /// The value of `relative` that was announced to the client.
    pub announced_relative: bool,
    pub rate: Rate,
    /// Last text that the guest copied.
    text: Option<Arc<Text>>,
    /// The client wants to be notified of new texts.
    notify: bool,
    /// A fence's reply that goes out with the effects of the next message (SyncNext).
    fence: Option<Vec<u8>>,
    confirmed: Confirmed,
}

/// Extensions that were confirmed. Each is confirmed once.
#[derive(Default)]
struct Confirmed {
    fence: bool,
    continuous: bool,
    power: bool,
}

impl Default for State {
    fn default() -> Self {
        Self {
            format: PixelFormat::OURS,
            preferences: Preferences::default(),
            request: None,
            continuous: None,
            // The first picture is not new to anybody, so clients that wait for changes come first.
            repeated: true,
            refresh: false,
            replies: Vec::new(),
            reports: VecDeque::new(),
            relative: false,
            announced_relative: false,
            rate: Rate::default(),
            text: None,
            notify: true,
            fence: None,
            confirmed: Confirmed::default(),
        }
    }
}

impl State {
    /// Announces or sends a text that the guest copied.
    pub(super) fn offer(&mut self, text: &Arc<Text>) {
        self.text = Some(text.clone());
        if self.replies.len() > MAX_REPLY_BYTES {
            return;
        }
        if !self.preferences.features.clipboard {
            text.latin(&mut self.replies);
        } else if self.notify {
            clipboard::notify(true, &mut self.replies);
        }
    }

    fn set_encodings(&mut self, numbers: &[i32], access: Access) {
        self.preferences = Preferences::read(numbers);
        let (features, replies) = (&self.preferences.features, &mut self.replies);
        let first = |supported: bool, confirmed: &mut bool| {
            supported && !std::mem::replace(confirmed, supported)
        };
        if first(features.fence, &mut self.confirmed.fence) {
            fence(FENCE_REQUEST, &0_u64.to_be_bytes(), replies);
        }
        if first(features.continuous, &mut self.confirmed.continuous) {
            replies.push(END_OF_CONTINUOUS);
        }
        if access == Access::Full && first(features.power, &mut self.confirmed.power) {
            power(XVP_INIT, replies);
        }
        if features.clipboard && access == Access::Full {
            clipboard::caps(replies);
        }
    }

    fn add_request(&mut self, incremental: bool, area: Area) {
        if !self.preferences.features.fence {
            self.rate.all_arrived(Instant::now());
        }
        if !incremental && self.preferences.features.screens {
            let report = Report { reason: 0, status: 0 };
            if !self.reports.contains(&report) {
                self.report(report);
            }
        }
        self.repeated |= !incremental;
        self.refresh |= !incremental;
        self.request = Some(self.request.map_or(area, |before| around(before, area)));
    }

    fn report(&mut self, report: Report) {
        if self.reports.len() < MAX_REPORTS {
            self.reports.push_back(report);
        }
    }

    /// Returns the text if the client provides one.
    fn clipboard(&mut self, message: ClipboardMessage, agent: bool) -> Option<String> {
        let replies = &mut self.replies;
        match message {
            ClipboardMessage::Caps { notify, .. } => self.notify = notify,
            ClipboardMessage::Request => match &self.text {
                Some(text) => text.provide(replies),
                None => Text::nothing(replies),
            },
            ClipboardMessage::Peek => clipboard::notify(self.text.is_some(), replies),
            // Without an agent, the text would have no destination.
            ClipboardMessage::Notify(true) if agent => clipboard::request(replies),
            ClipboardMessage::Provide(text) => return Some(text),
            ClipboardMessage::Notify(_) | ClipboardMessage::Other => {}
        }
        None
    }
}

/// The smallest area that contains both.
fn around(one: Area, other: Area) -> Area {
    let end = |start: u16, length: u16| start.saturating_add(length);
    let (x, y) = (one.x.min(other.x), one.y.min(other.y));
    let right = end(one.x, one.width).max(end(other.x, other.width));
    let bottom = end(one.y, one.height).max(end(other.y, other.height));
    Area { x, y, width: right - x, height: bottom - y }
}

pub(super) fn fence(flags: u32, payload: &[u8], out: &mut Vec<u8>) {
    out.extend([248, 0, 0, 0]);
    out.extend(flags.to_be_bytes());
    out.push(u8::try_from(payload.len()).unwrap_or(0));
    out.extend(payload);
}

/// Appends a fence behind an update. The client's reply confirms that the update has arrived.
pub(super) fn milestone(number: u64, out: &mut Vec<u8>) {
    fence(FENCE_REQUEST | 1, &number.to_be_bytes(), out);
}

/// Answers to `SetDesktopSize`. A size that is forwarded to the guest may still be refused there.
const PROHIBITED: u16 = 1;
const OUT_OF_RESOURCES: u16 = 2;
const INVALID_LAYOUT: u16 = 3;
const FORWARDED: u16 = 4;

/// Codes of the xvp extension.
const XVP_FAIL: u8 = 0;
const XVP_INIT: u8 = 1;
const XVP_SHUTDOWN: u8 = 2;
const XVP_RESET: u8 = 4;

fn power(code: u8, out: &mut Vec<u8>) {
    out.extend([250, 0, 1, code]);
}

/// Reader of one client's messages.
pub(super) struct Session {
    server: Arc<Server>,
    client: Arc<Client>,
    input: ClientInput,
    buffer: Vec<u8>,
    /// Bytes of an oversized message that are still to be skipped.
    skip: usize,
    /// The next message is a key press, and the guest's queue is full.
    ahead: bool,
    /// Number of button presses, and the time since which they are counted.
    pressed: (u32, Instant),
}

impl Session {
    pub(super) fn new(server: Arc<Server>, client: Arc<Client>) -> Self {
        let input =
            ClientInput::new(server.interfaces.hub.clone(), server.interfaces.layout.clone());
        let pressed = (0, Instant::now());
        Self { server, client, input, buffer: Vec::new(), skip: 0, ahead: false, pressed }
    }

    pub(super) async fn run<R: AsyncRead + Unpin>(mut self, mut reader: R) -> anyhow::Result<()> {
        let mut bytes = vec![0; READ_SIZE];
        loop {
            let count = reader.read(&mut bytes).await?;
            if count == 0 {
                return Ok(());
            }
            let skipped = self.skip.min(count);
            self.skip -= skipped;
            self.buffer.extend_from_slice(&bytes[skipped..count]);
            while self.take()? {
                yield_now().await;
                while self.has_unread_replies() {
                    self.client.room.notified().await;
                }
                if self.ahead && !self.input.wait(PATIENCE).await {
                    let peer = &self.client.peer;
                    tracing::info!("vnc: {peer}: keys are dropped: the guest does not read them");
                }
            }
        }
    }

    fn has_unread_replies(&self) -> bool {
        self.client.state(|state| state.replies.len()) > MAX_REPLY_BYTES
    }

    /// Whether this message is a key press that the guest has no room for.
    fn is_ahead(&mut self, message: &Message) -> bool {
        let pressed =
            matches!(message, Message::Key { down: true, .. } | Message::Code { down: true, .. });
        pressed && self.client.access == Access::Full && self.input.must_wait()
    }

    /// Handles buffered messages. Returns true if more remain, or if too many replies are pending.
    fn take(&mut self) -> anyhow::Result<bool> {
        let (mut start, mut count, mut more) = (0, 0, true);
        while more && count < MAX_BATCH && !self.has_unread_replies() {
            let more_buttons = self.client.state(|state| state.preferences.features.buttons);
            let Some((message, used)) = message::parse(&self.buffer[start..], more_buttons)? else {
                more = false;
                continue;
            };
            self.ahead = self.is_ahead(&message);
            if self.ahead {
                break;
            }
            (start, count) = (start + used, count + 1);
            self.handle(message);
            let skipped = self.skip.min(self.buffer.len() - start);
            self.skip -= skipped;
            start += skipped;
        }
        self.buffer.drain(..start);
        if self.buffer.is_empty() {
            // Free the memory of a long message.
            self.buffer.shrink_to(READ_SIZE);
        }
        self.client.viewer.wake.notify_one();
        Ok(more)
    }

    fn handle(&mut self, message: Message) {
        let before = self.client.state(|state| state.fence.take());
        match message {
            Message::Key { .. } | Message::Pointer { .. } | Message::Code { .. } => {
                self.input(&message);
            }
            Message::CutText(bytes) => self.copied(|| clipboard::from_latin(&bytes)),
            Message::Clipboard(bytes) => self.clipboard(&bytes),
            Message::Power { version, code } => self.power(version, code),
            Message::Size { width, height, screens } => self.size((width, height), &screens),
            Message::Sound(request) => self.sound(request),
            Message::TooLong(length) => {
                tracing::debug!(
                    "vnc: {}: ignored a text of {length} bytes: too long",
                    self.client.peer
                );
                self.skip = length;
            }
            other => self.handle_display(other),
        }
        if let Some(fence) = before {
            self.client.state(|state| state.replies.extend(fence));
        }
    }

    /// Handles messages that only concern the picture and the connection.
    fn handle_display(&self, message: Message) {
        let client = &self.client;
        match message {
            Message::PixelFormat(format) => client.state(|state| {
                state.format = format;
                if format.mapped {
                    state.replies.extend(PixelFormat::colour_map());
                }
            }),
            Message::Encodings(numbers) => {
                client.state(|state| state.set_encodings(&numbers, client.access));
            }
            Message::Request { incremental, area } => {
                if !incremental {
                    client.viewer.dirty(|dirty| dirty.insert_area(area));
                }
                client.state(|state| state.add_request(incremental, area));
            }
            Message::Continuous { on, area } => client.state(|state| {
                state.continuous = on.then_some(area);
                if !on {
                    state.replies.push(END_OF_CONTINUOUS);
                }
            }),
            Message::Fence { flags, payload } => client.state(|state| {
                if flags & FENCE_REQUEST == 0 {
                    if let Ok(number) = payload.try_into().map(u64::from_be_bytes) {
                        state.rate.arrived(number, Instant::now());
                    }
                    return;
                }
                let mut answer = Vec::new();
                fence(flags & FENCE_KNOWN, &payload, &mut answer);
                if flags & FENCE_SYNC_NEXT == 0 {
                    state.replies.extend(answer);
                } else {
                    state.fence = Some(answer);
                }
            }),
            _ => {}
        }
    }

    fn input(&mut self, message: &Message) {
        if self.client.access != Access::Full {
            return;
        }
        match *message {
            Message::Key { down, keysym } => self.input.key(Source::Symbol(keysym), down),
            Message::Code { down, keysym, code } => {
                self.input.key_at(keys::from_scan_code(code), keysym, down);
            }
            Message::Pointer { buttons, x, y } => {
                let size = self.client.viewer.dirty(|dirty| dirty.size());
                let event = PointerEvent { x, y, buttons };
                if self.client.state(|state| state.announced_relative) {
                    self.input.move_relative(event, size);
                } else {
                    self.input.move_to(event, size);
                }
                let relative = self.input.is_relative();
                self.client.state(|state| state.relative = relative);
            }
            _ => {}
        }
        self.server.canvas.scan_soon();
    }

    /// Passes a text to the guest's agent. It is not decoded if it has no destination.
    fn copied(&self, text: impl FnOnce() -> String) {
        let clipboard = &self.server.interfaces.clipboard;
        if self.client.access == Access::Full && clipboard.has_agent() {
            return clipboard.offer(&text());
        }
        tracing::debug!("vnc: {}: ignored a text: no agent, or view-only access", self.client.peer);
    }

    fn clipboard(&self, bytes: &[u8]) {
        if self.client.access != Access::Full {
            return;
        }
        let agent = self.server.interfaces.clipboard.has_agent();
        if !agent && clipboard::is_text(bytes) {
            return self.copied(String::new);
        }
        match clipboard::read(bytes) {
            Ok(message) => {
                if let Some(text) = self.client.state(|state| state.clipboard(message, agent)) {
                    self.copied(|| text);
                }
            }
            Err(error) => tracing::debug!("vnc: {}: {error:#}", self.client.peer),
        }
    }

    fn power(&mut self, version: u8, code: u8) {
        let button = match (version, code) {
            (1, XVP_SHUTDOWN) => Some(Power::Off),
            (1, XVP_RESET) => Some(Power::Reset),
            // No button of the machine reboots a guest gracefully.
            _ => None,
        };
        if self.pressed.1.elapsed() > MAX_PRESSES.1 {
            self.pressed = (0, Instant::now());
        }
        let early = self.pressed.0 >= MAX_PRESSES.0;
        match button.filter(|_| self.client.access == Access::Full && !early) {
            Some(button) => {
                self.pressed.0 += 1;
                tracing::info!(
                    "vnc: {} pressed a button of the machine: {button:?}",
                    self.client.peer
                );
                (self.server.interfaces.power)(button);
            }
            None => self.client.state(|state| power(XVP_FAIL, &mut state.replies)),
        }
    }

    /// Ignores a format that we cannot send, as the client cannot learn of it.
    fn sound(&self, request: SoundRequest) {
        let (client, hub) = (&self.client, &self.server.interfaces.sound);
        if !hub.has_card() {
            return;
        }
        let viewer = client.viewer.clone();
        let wake = Arc::new(move || viewer.wake.notify_one());
        if let Err(error) = client.sound().handle(request, hub, wake) {
            tracing::debug!("vnc: {}: {error:#}", client.peer);
        }
    }

    /// Handles `SetDesktopSize`. The last request decides for all viewers.
    fn size(&self, (width, height): (u16, u16), screens: &[Screen]) {
        let fits = (1..=MAX_SIDE).contains(&width) && (1..=MAX_SIDE).contains(&height);
        let status = match (self.server.canvas.scanout(), screens) {
            _ if self.client.access != Access::Full => PROHIBITED,
            (None, _) => PROHIBITED,
            // The position is ignored: LibVNC sends uninitialized memory in it.
            (Some(scanout), [Screen { area, .. }])
                if fits && (area.width, area.height) == (width, height) =>
            {
                let accepted = scanout.set_preferred_size(width.into(), height.into());
                if accepted { FORWARDED } else { OUT_OF_RESOURCES }
            }
            _ => INVALID_LAYOUT,
        };
        self.client.state(|state| {
            // A client without the extension could not parse the reply.
            if state.preferences.features.screens {
                state.report(Report { reason: 1, status });
            }
        });
    }
}
