//! Input events from viewers and the control socket to the guest's keyboards and mice.
//!
//! Input devices register a sink when they are built; the screen and the control socket push events
//! into the hub. The hub offers an event to the devices, the newest first, and stops at the first
//! that the guest listens to, so that no key arrives twice.

use std::collections::BTreeSet;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard};

use serde::{Deserialize, Serialize};

/// A key by its position on the keyboard: its make code in scan code set 1, `0xe0__` where that
/// code has the prefix. The guest's keyboard layout decides which character it stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u16", into = "u16")]
pub struct Key(u16);

impl Key {
    /// The one key with the prefix E1.
    pub const PAUSE: Self = Self(0xe11d);
    /// Print Screen, which is SysRq together with Alt.
    pub const PRINT: Self = Self(0xe037);
    /// Hanja (LANG2). It has no break code: nothing is sent when it is released.
    pub const HANJA: Self = Self(0xf1);
    /// Hangul (LANG1). It has no break code, as [`Self::HANJA`].
    pub const HANGUL: Self = Self(0xf2);

    pub fn new(code: u16) -> Option<Self> {
        let key = Self(code);
        let special = [Self::PAUSE, Self::HANJA, Self::HANGUL].contains(&key);
        let plain = matches!(code >> 8, 0 | 0xe0) && (1..0x80).contains(&(code & 0xff));
        (special || plain).then_some(key)
    }

    pub fn code(self) -> u16 {
        self.0
    }
}

impl TryFrom<u16> for Key {
    type Error = String;

    fn try_from(code: u16) -> Result<Self, String> {
        Self::new(code).ok_or_else(|| format!("{code:#x} is not a key of scan code set 1"))
    }
}

impl From<Key> for u16 {
    fn from(key: Key) -> Self {
        key.0
    }
}

/// A relative movement of a mouse, and the buttons that are down now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Motion {
    /// Positive to the right.
    pub dx: i32,
    /// Positive downwards, as on screens.
    pub dy: i32,
    /// Notches of the wheel, positive away from the user.
    pub wheel: i32,
    /// Bit 0 left, 1 right, 2 middle, 3 back, 4 forward.
    pub buttons: u8,
}

/// The position of an absolute pointer (a tablet), and the buttons that are down now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Position {
    /// From 0 at the left edge of the screen to [`Position::MAX`] at the right edge.
    pub x: u16,
    /// From 0 at the upper edge to [`Position::MAX`] at the lower edge.
    pub y: u16,
    /// Notches of the wheel, positive away from the user.
    pub wheel: i32,
    /// Notches of the horizontal wheel, positive to the right.
    pub pan: i32,
    /// Bit 0 left, 1 right, 2 middle, 3 back, 4 forward.
    pub buttons: u8,
}

impl Position {
    pub const MAX: u16 = 0x7fff;
}

/// The LEDs of a keyboard, as the guest set them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Lights {
    pub caps: bool,
    pub num: bool,
    pub scroll: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A key went down (true) or up. A key that is down may go down again: keyboards repeat.
    Key(Key, bool),
    Motion(Motion),
    Position(Position),
}

/// An input device, seen from the host's side.
pub trait Sink: Send + Sync {
    /// Returns false when the guest does not listen to this device, or is parked.
    fn take(&self, event: Event) -> bool;
    /// A keyboard's lights. `None` for other devices, and while the guest does not listen to this
    /// keyboard.
    fn lights(&self) -> Option<Lights> {
        None
    }
    /// Whether the guest has read all events that this device took.
    fn is_idle(&self) -> bool {
        true
    }
    /// Whether a sender that can wait may send more. Devices queue events that the guest has not
    /// read, up to a limit; beyond it they drop whole keys.
    fn has_room(&self) -> bool {
        true
    }
}

#[derive(Default)]
pub struct Hub(Mutex<Devices>);

#[derive(Default)]
struct Devices {
    sinks: Vec<Arc<dyn Sink>>,
    /// Keys that went down and that no keyboard has released since.
    down: BTreeSet<Key>,
    /// Those of them that were released while all keyboards were parked: for the guest, they would
    /// stay down for ever. They are released before the next event.
    late: BTreeSet<Key>,
}

impl Devices {
    /// Offers the event to the devices, the newest first.
    fn push(&self, event: Event) -> bool {
        self.sinks.iter().rev().any(|sink| sink.take(event))
    }

    fn press(&mut self, key: Key) -> bool {
        let taken = self.push(Event::Key(key, true));
        if taken {
            self.down.insert(key);
        }
        taken
    }

    /// A release goes to all keyboards: the guest may have begun to listen to another keyboard
    /// after the key went down, and the key would stay down on the first one.
    fn release(&mut self, key: Key) -> bool {
        let event = Event::Key(key, false);
        let taken = self.sinks.iter().rev().filter(|sink| sink.take(event)).count() > 0;
        if taken {
            self.down.remove(&key);
        }
        taken
    }
}

impl Hub {
    pub fn register(&self, sink: Arc<dyn Sink>) {
        self.devices().sinks.push(sink);
    }

    pub fn unregister(&self, sink: &Arc<dyn Sink>) {
        self.devices().sinks.retain(|it| !Arc::ptr_eq(it, sink));
    }

    /// Returns false when no device took it.
    pub fn key(&self, key: Key, down: bool) -> bool {
        let mut devices = self.current();
        if down {
            return devices.press(key);
        }
        let taken = devices.release(key);
        if devices.down.contains(&key) {
            devices.late.insert(key);
        }
        taken
    }

    /// Returns false when no device took it.
    pub fn motion(&self, motion: Motion) -> bool {
        self.current().push(Event::Motion(motion))
    }

    /// Returns false when no device took it: there is no tablet, or the guest has no driver for it.
    pub fn position(&self, position: Position) -> bool {
        self.current().push(Event::Position(position))
    }

    /// Releases all keys: the guest goes on in another process, which does not learn of it when
    /// they are released.
    pub fn release_all(&self) {
        let mut devices = self.devices();
        for key in devices.down.clone() {
            devices.release(key);
        }
    }

    /// The lights of the keyboard that keys would go to.
    pub fn lights(&self) -> Option<Lights> {
        self.devices().sinks.iter().rev().find_map(|sink| sink.lights())
    }

    /// Whether the guest has read all keys of the keyboard that it listens to.
    pub fn is_idle(&self) -> bool {
        self.keyboard().is_none_or(|sink| sink.is_idle())
    }

    /// Whether the keyboard that keys go to has room. Senders wait for this, or keys are dropped.
    pub fn has_room(&self) -> bool {
        self.keyboard().is_none_or(|sink| sink.has_room())
    }

    fn keyboard(&self) -> Option<Arc<dyn Sink>> {
        self.devices().sinks.iter().rev().find(|sink| sink.lights().is_some()).cloned()
    }

    /// The devices, after late releases. The lock also prevents interleaving of events from two
    /// viewers.
    fn current(&self) -> MutexGuard<'_, Devices> {
        let mut devices = self.devices();
        for key in mem::take(&mut devices.late) {
            if !devices.release(key) {
                devices.late.insert(key);
            }
        }
        devices
    }

    fn devices(&self) -> MutexGuard<'_, Devices> {
        self.0.lock().expect("no input device panicked")
    }
}

#[cfg(test)]
mod test {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    /// Takes all events while it is not deaf.
    #[derive(Default)]
    struct Recorder {
        deaf: AtomicBool,
        events: Mutex<Vec<Event>>,
    }

    impl Recorder {
        /// The events since the last call.
        fn taken(&self) -> Vec<Event> {
            mem::take(&mut *self.events.lock().unwrap())
        }
    }

    /// A keyboard that the guest does not read.
    struct Waiting;

    impl Sink for Waiting {
        fn take(&self, _: Event) -> bool {
            true
        }
        fn lights(&self) -> Option<Lights> {
            Some(Lights::default())
        }
        fn is_idle(&self) -> bool {
            false
        }
    }

    #[test]
    fn idle_depends_on_unread_keys_of_the_active_keyboard() {
        let hub = Hub::default();
        assert!(hub.is_idle(), "nothing waits");
        hub.register(Arc::new(Waiting));
        hub.register(Arc::<Recorder>::default());
        assert!(!hub.is_idle(), "a mouse that came later is no keyboard");
    }

    impl Sink for Recorder {
        fn take(&self, event: Event) -> bool {
            let listens = !self.deaf.load(Ordering::Relaxed);
            if listens {
                self.events.lock().unwrap().push(event);
            }
            listens
        }
    }

    #[test]
    fn only_the_newest_listening_device_gets_the_event() {
        let hub = Hub::default();
        let (old, new) = (Arc::<Recorder>::default(), Arc::<Recorder>::default());
        assert!(!hub.key(Key::PAUSE, true), "there is no device");
        hub.register(old.clone());
        hub.register(new.clone());
        assert!(hub.motion(Motion::default()));
        new.deaf.store(true, Ordering::Relaxed);
        assert!(hub.key(Key::PAUSE, true));
        let taken = [&old, &new].map(|it| it.taken().len());
        assert_eq!(taken, [1, 1]);
        hub.unregister(&(old as Arc<dyn Sink>));
        assert!(!hub.key(Key::PAUSE, false), "the one is gone, the other deaf");
    }

    #[test]
    fn keys_that_are_released_while_the_machine_is_paused_do_not_stay_down() {
        let (hub, keyboard) = (Hub::default(), Arc::<Recorder>::default());
        hub.register(keyboard.clone());
        let [shift, a, b] = [0x2a, 0x1e, 0x30].map(|code| Key::new(code).unwrap());
        for key in [shift, a] {
            assert!(hub.key(key, true));
        }
        keyboard.deaf.store(true, Ordering::Relaxed);
        // `b` was not down before, and `a` is held.
        for (key, down) in [(shift, false), (b, true), (b, false)] {
            assert!(!hub.key(key, down));
        }
        keyboard.deaf.store(false, Ordering::Relaxed);
        keyboard.taken();
        assert!(hub.motion(Motion::default()));
        assert!(hub.motion(Motion::default()));
        let motion = Event::Motion(Motion::default());
        assert_eq!(keyboard.taken(), [Event::Key(shift, false), motion, motion]);
        hub.release_all();
        hub.release_all();
        assert_eq!(keyboard.taken(), [Event::Key(a, false)]);
    }

    #[test]
    fn refuses_invalid_key_codes() {
        for good in [0x01, 0x7f, 0xe01c, 0xe11d, 0xf1, 0xf2] {
            assert_eq!(Key::new(good).map(Key::code), Some(good), "{good:#x}");
        }
        for bad in [0, 0x80, 0xf0, 0xe000, 0xe080, 0xe11e, 0x11c, 0xffff] {
            assert!(Key::new(bad).is_none(), "{bad:#x}");
        }
    }
}
