//! Passes the keyboard and pointer input of one client to the guest.
//!
//! When a client disconnects, all its keys and buttons are released. A modifier that remains
//! pressed would change everything that is typed afterwards.

use std::sync::Arc;
use std::time::Duration;

use host::input::{Hub, Key, Motion, Position};
use tokio::time::{Instant, sleep};

use crate::keys::layout::Layout;
use crate::keys::translate::{KeyTranslator, Source, Step};

pub struct ClientInput {
    hub: Arc<Hub>,
    translator: KeyTranslator,
    pointer: Pointer,
    /// The guest has not read keys for a long time. Further keys are dropped until it does.
    gave_up: bool,
}

#[derive(Clone, Copy)]
pub struct PointerEvent {
    /// Like `y`: position in pixels, or movement with an offset of 0x7fff.
    pub x: u16,
    pub y: u16,
    /// Bits as in the protocol.
    pub buttons: u16,
}

#[derive(Default)]
struct Pointer {
    /// Bits as in the protocol's `PointerEvent`.
    buttons: u16,
    x: i32,
    y: i32,
    /// Size of the picture in pixels.
    size: (u16, u16),
    /// The guest has no tablet, so only relative movements work.
    relative: bool,
}

/// Buttons that mean turns of the wheel: up and down.
const WHEEL: [u16; 2] = [1 << 3, 1 << 4];
/// Buttons that mean turns of the wheel: left and right.
const PAN: [u16; 2] = [1 << 5, 1 << 6];
/// How often to check whether a full queue has room again.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Coordinate that means no movement, for clients that send movements.
const NO_MOVEMENT: i32 = 0x7fff;

impl ClientInput {
    pub fn new(hub: Arc<Hub>, layout: Arc<Layout>) -> Self {
        let (pointer, gave_up) = (Pointer::default(), false);
        Self { hub, translator: KeyTranslator::new(layout), pointer, gave_up }
    }

    /// Whether the client must wait before it presses another key, because the guest's queue is
    /// full.
    pub fn must_wait(&mut self) -> bool {
        let room = self.hub.has_room();
        self.gave_up &= !room;
        !room && !self.gave_up
    }

    /// Waits until the guest reads keys again, for at most `patience`. Returns whether it does.
    pub async fn wait(&mut self, patience: Duration) -> bool {
        let start = Instant::now();
        while self.must_wait() {
            self.gave_up = start.elapsed() > patience;
            sleep(POLL_INTERVAL).await;
        }
        !self.gave_up
    }

    /// Whether clients should send relative movements instead of positions.
    pub fn is_relative(&self) -> bool {
        self.pointer.relative
    }

    pub fn key(&mut self, source: Source, down: bool) {
        let lights = self.hub.lights();
        let steps = self.translator.key_event(source, down, lights);
        self.send(steps);
    }

    /// Presses or releases a key for which the client sends the symbol, and the position on the
    /// keyboard if we know it.
    pub fn key_at(&mut self, key: Option<Key>, keysym: u32, down: bool) {
        let symbol = Source::Symbol(keysym);
        // The key may have been pressed by its symbol, before the client knew that positions are
        // supported.
        let before = !down && self.translator.holds(symbol);
        self.key(key.filter(|_| !before).map_or(symbol, Source::Key), down);
    }

    fn send(&self, steps: Vec<Step>) {
        for (key, down) in steps {
            self.hub.key(key, down);
        }
    }

    /// Moves the pointer to a pixel of a picture of `size`, and sets the buttons.
    pub fn move_to(&mut self, event: PointerEvent, size: (u16, u16)) {
        let PointerEvent { x, y, buttons } = event;
        let (x, y) = (i32::from(x), i32::from(y));
        let distance = (x - self.pointer.x, y - self.pointer.y);
        self.pointer.size = size;
        self.move_by(distance, buttons);
    }

    /// Moves the pointer by a distance, which is encoded with an offset of 0x7fff, and sets the
    /// buttons.
    pub fn move_relative(&mut self, event: PointerEvent, size: (u16, u16)) {
        let PointerEvent { x, y, buttons } = event;
        self.pointer.size = size;
        self.move_by((i32::from(x) - NO_MOVEMENT, i32::from(y) - NO_MOVEMENT), buttons);
    }

    fn move_by(&mut self, (dx, dy): (i32, i32), buttons: u16) {
        let pressed = buttons & !self.pointer.buttons;
        let notches = |[more, less]: [u16; 2]| {
            i32::from(pressed & more != 0) - i32::from(pressed & less != 0)
        };
        let (wheel, pan) = (notches(WHEEL), -notches(PAN));
        let pointer = &mut self.pointer;
        pointer.buttons = buttons;
        let size = pointer.size;
        let last = |length: u16| i32::from(length.max(1)) - 1;
        pointer.x = (pointer.x + dx).clamp(0, last(size.0));
        pointer.y = (pointer.y + dy).clamp(0, last(size.1));
        let scale = |at: i32, length: u16| {
            let most = i64::from(Position::MAX);
            let scaled = i64::from(at) * most / i64::from(last(length).max(1));
            u16::try_from(scaled.clamp(0, most)).unwrap_or(0)
        };
        let (x, y) = (scale(pointer.x, size.0), scale(pointer.y, size.1));
        let buttons = our_buttons(buttons);
        // A tablet may appear at any time, for example when an operating system has started.
        pointer.relative = !self.hub.position(Position { x, y, wheel, pan, buttons });
        if pointer.relative {
            self.hub.motion(Motion { dx, dy, wheel, buttons });
        }
    }
}

fn our_buttons(buttons: u16) -> u8 {
    // Left, right, middle, back, forward.
    let theirs = [0, 2, 1, 7, 8];
    (0..)
        .zip(theirs)
        .fold(0, |sum, (ours, theirs)| sum | u8::from(buttons >> theirs & 1 != 0) << ours)
}

impl Drop for ClientInput {
    fn drop(&mut self) {
        let steps = self.translator.release_all();
        self.send(steps);
        if our_buttons(self.pointer.buttons) != 0 {
            // Release the buttons at the current position.
            self.move_by((0, 0), 0);
        }
    }
}

#[cfg(test)]
mod test {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, Ordering};

    use host::input::{Event, Lights, Sink};

    use super::*;

    #[derive(Default)]
    struct Seen {
        tablet: AtomicBool,
        events: Mutex<Vec<Event>>,
    }

    impl Sink for Seen {
        fn take(&self, event: Event) -> bool {
            if matches!(event, Event::Position(_)) && !self.tablet.load(Ordering::Relaxed) {
                return false;
            }
            self.events.lock().unwrap().push(event);
            true
        }
    }

    fn input() -> (ClientInput, Arc<Seen>) {
        let (hub, seen) = (Arc::<Hub>::default(), Arc::<Seen>::default());
        hub.register(seen.clone());
        (ClientInput::new(hub, Layout::named("us").unwrap()), seen)
    }

    /// A keyboard whose queue is full while the flag is set.
    #[derive(Default)]
    struct Full(AtomicBool);

    impl Sink for Full {
        fn take(&self, _: Event) -> bool {
            true
        }
        fn lights(&self) -> Option<Lights> {
            Some(Lights::default())
        }
        fn has_room(&self) -> bool {
            !self.0.load(Ordering::Relaxed)
        }
    }

    #[tokio::test]
    async fn a_stalled_guest_is_waited_for_once() {
        const LONG: Duration = Duration::from_secs(60);
        let (hub, full) = (Arc::<Hub>::default(), Arc::<Full>::default());
        hub.register(full.clone());
        let mut input = ClientInput::new(hub, Layout::named("us").unwrap());
        assert!(!input.must_wait() && input.wait(LONG).await);
        full.0.store(true, Ordering::Relaxed);
        let reads = async {
            sleep(5 * POLL_INTERVAL).await;
            full.0.store(false, Ordering::Relaxed);
        };
        let (read, ()) = tokio::join!(input.wait(LONG), reads);
        assert!(read, "the guest read in time");
        full.0.store(true, Ordering::Relaxed);
        assert!(
            input.must_wait() && !input.wait(2 * POLL_INTERVAL).await,
            "the guest reads nothing"
        );
        assert!(!input.must_wait() && !input.wait(LONG).await, "a second wait");
        full.0.store(false, Ordering::Relaxed);
        assert!(!input.must_wait());
        full.0.store(true, Ordering::Relaxed);
        assert!(input.must_wait(), "the guest has read since, so wait again");
    }

    #[test]
    fn held_keys_and_buttons_are_released_when_the_client_leaves() {
        let (mut input, seen) = input();
        seen.tablet.store(true, Ordering::Relaxed);
        let (shift, a) = (Source::Symbol(0xffe1), Source::Key(Key::new(0x1e).unwrap()));
        input.key(shift, true);
        input.key(a, true);
        input.key(a, false);
        input.key(a, false);
        input.move_to(PointerEvent { x: 0, y: 0, buttons: 1 }, (640, 480));
        seen.events.lock().unwrap().clear();
        drop(input);
        let events = seen.events.lock().unwrap();
        assert_eq!(events[0], Event::Key(Key::new(0x2a).unwrap(), false));
        assert_eq!(events.len(), 2, "the key, and the button: {events:?}");
    }

    #[test]
    fn a_key_pressed_by_keysym_is_released_by_scancode() {
        let (mut input, seen) = input();
        // The guest's keyboard has `z` at another position than the client's.
        for (keysym, code, guest) in [(0xff0d, 0x1c, 0x1c), (0x7a, 0x15, 0x2c)] {
            input.key(Source::Symbol(keysym), true);
            for down in [false, true, false] {
                input.key_at(Key::new(code), keysym, down);
            }
            let key = |code, down| Event::Key(Key::new(code).unwrap(), down);
            let wanted = [(guest, true), (guest, false), (code, true), (code, false)];
            let wanted = wanted.map(|(code, down)| key(code, down));
            assert_eq!(std::mem::take(&mut *seen.events.lock().unwrap()), wanted);
        }
    }

    #[test]
    fn a_tablet_gets_positions_and_a_mouse_gets_movements() {
        let (mut input, seen) = input();
        input.move_to(PointerEvent { x: 10, y: 20, buttons: 0 }, (640, 480));
        assert!(input.is_relative());
        input.move_to(PointerEvent { x: 13, y: 18, buttons: 0b101 }, (640, 480));
        input.move_relative(PointerEvent { x: 0x7fff, y: 0x8000, buttons: 0 }, (640, 480));
        seen.tablet.store(true, Ordering::Relaxed);
        input.move_to(PointerEvent { x: 639, y: 479, buttons: 1 << 3 }, (640, 480));
        input.move_to(PointerEvent { x: 639, y: 479, buttons: 1 << 6 | 1 << 7 }, (640, 480));
        assert!(!input.is_relative());
        let motion = |dx, dy, buttons| Event::Motion(Motion { dx, dy, wheel: 0, buttons });
        let most = Position::MAX;
        let position = |wheel, pan, buttons| {
            Event::Position(Position { x: most, y: most, wheel, pan, buttons })
        };
        assert_eq!(
            *seen.events.lock().unwrap(),
            [
                motion(10, 20, 0),
                motion(3, -2, 0b011),
                motion(0, 1, 0),
                position(1, 0, 0),
                position(0, 1, 0b1000)
            ]
        );
    }

    #[test]
    fn tiny_pictures_and_positions_outside_are_harmless() {
        let (mut input, _) = input();
        for size in [(0, 0), (1, 1), (65535, 1)] {
            input.move_to(PointerEvent { x: 65535, y: 65535, buttons: 0xffff }, size);
            input.move_relative(PointerEvent { x: 0, y: 0xffff, buttons: 0 }, size);
        }
    }
}
