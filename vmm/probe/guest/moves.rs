//! `moves=ROUNDS`: moves the BARs of all functions of bus 0, as Windows 11 25H2 does when it
//! rebalances resources: one by one and over each other, while disks, network and display work.
//!
//! Each round gives every BAR another place. A moved BAR lies over one that has not moved yet. The
//! rounds differ in the order, in decoding, and in the halves of 64-bit BARs.
use crate::config::{BARS, COMMAND, Function};
use crate::io::{read8, read64, write64};
use crate::pci::{Bar, Bars, DECODE};

/// Maximum number of BARs, and of functions.
const MAX: usize = 96;
/// 64-bit BARs move to places from here on, or behind the last of them. Every other place is
/// 4 GiB higher, so that some moves change the upper half, and others both halves.
const ARENA: u64 = 40 << 30;
const FAR: u64 = 1 << 32;
/// BARs from this size on hold a picture.
const LARGE: u64 = 4 << 20;
/// Places for a picture of 32 bits, in sizes from its first one: over its neighbours, and free.
const PICTURE_PLACES: u64 = 3;
/// Bytes between two words of the picture that are checked.
const STEP: u64 = 0x1_1000;
const WORDS: u64 = 24;

/// A BAR, its first address and its present one.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    at: Function,
    bar: Bar,
    home: u64,
    now: u64,
}

impl Place {
    fn is_wide(&self) -> bool {
        self.bar.flags & 7 == 4
    }

    /// Whether both BARs can exchange their addresses.
    fn is_like(&self, other: &Self) -> bool {
        self.bar.flags & 7 == other.bar.flags & 7 && self.bar.length == other.bar.length
    }

    fn write(&mut self, address: u64, high_first: bool) {
        let register = 0x10 + 4 * self.bar.index;
        let mut halves = [(register, address as u32), (register + 4, (address >> 32) as u32)];
        if high_first {
            halves.reverse();
        }
        let used = halves.iter().filter(|half| self.is_wide() || half.0 == register);
        used.for_each(|&(register, half)| self.at.write(register, half));
        self.now = address;
    }

    /// Determines the size while the function decodes.
    fn size(&mut self) -> bool {
        let register = 0x10 + 4 * self.bar.index;
        self.at.write(register, u32::MAX);
        let probed = self.at.read(register) & !0xf;
        self.at.write(register, self.now as u32);
        let bytes = u64::from(!probed).wrapping_add(1) & 0xffff_ffff;
        self.bar.flags & 1 == 1 || bytes == self.bar.length
    }
}

/// The BARs of all functions.
pub(crate) struct Places {
    list: [Place; MAX],
    used: usize,
    arena: u64,
    /// Bytes between two places of 64-bit BARs.
    stride: u64,
}

impl Places {
    pub(crate) fn find() -> Self {
        let nowhere = Function { device: 0, function: 0 };
        let empty = Place { at: nowhere, bar: Bar::default(), home: 0, now: 0 };
        let mut all = Self { list: [empty; MAX], used: 0, arena: ARENA, stride: 1 << 14 };
        for number in 0..256 {
            let at = Function { device: number / 8, function: number % 8 };
            if !at.exists() || at.read(0xc) >> 16 & 0x7f != 0 {
                continue;
            }
            let mut bars = Bars::default();
            bars.size(at, BARS);
            for bar in bars.list().filter(|bar| bar.base != 0) {
                if let Some(free) = all.list.get_mut(all.used) {
                    *free = Place { at, bar: *bar, home: bar.base, now: bar.base };
                    all.used += 1;
                }
            }
        }
        for it in all.list[..all.used].iter().filter(|it| it.is_wide()) {
            all.stride = all.stride.max(it.bar.length);
            all.arena = all.arena.max((it.home + it.bar.length).next_multiple_of(FAR));
        }
        all
    }

    pub(crate) fn count(&self) -> u64 {
        self.used as u64
    }

    /// The present address of a BAR.
    pub(crate) fn now(&self, at: Function, bar: u8) -> Option<u64> {
        let is_it = |it: &&Place| {
            (it.at.device, it.at.function, it.bar.index) == (at.device, at.function, bar)
        };
        self.list[..self.used].iter().find(is_it).map(|it| it.now)
    }

    /// The address of a BAR after this round.
    fn target(&self, index: usize, round: u64) -> u64 {
        let it = &self.list[index];
        let all = || self.list[..self.used].iter();
        if it.is_wide() && it.bar.length < LARGE {
            let count = all().filter(|other| other.is_wide()).count() as u64;
            let before = self.list[..index].iter().filter(|other| other.is_wide()).count() as u64;
            let place = (before + round) % count;
            return self.arena + place * self.stride + place % 2 * FAR;
        }
        if it.bar.length >= LARGE {
            let free = if round % 2 == 0 { 0 } else { PICTURE_PLACES };
            return it.home + free * it.bar.length;
        }
        let like = all().filter(|other| other.is_like(it)).count() as u64;
        let before = self.list[..index].iter().filter(|other| other.is_like(it)).count() as u64;
        let mut same = all().filter(|other| other.is_like(it));
        same.nth(((before + round) % like) as usize).map_or(it.home, |other| other.home)
    }

    /// Moves all BARs, and calls `between` after each step in which BARs lie over each other.
    pub(crate) fn rebalance(&mut self, round: u64, between: &mut dyn FnMut(&Self)) {
        let targets: [u64; MAX] = core::array::from_fn(|index| match index < self.used {
            true => self.target(index, round),
            false => 0,
        });
        let (high_first, off, stack) = (round % 4 == 1, round % 4 == 2, round % 4 == 3);
        if off {
            self.each_function(|command| command & !DECODE);
        }
        if stack {
            self.stack(between);
        }
        for step in 0..self.used {
            let index = if high_first { self.used - 1 - step } else { step };
            let it = &mut self.list[index];
            if it.bar.length >= LARGE {
                // First over the BARs behind it.
                it.write(it.home + it.bar.length, high_first);
                between(self);
            }
            self.list[index].write(targets[index], high_first);
            between(self);
        }
        if off {
            self.each_function(|command| command | DECODE);
        }
    }

    /// Determines all sizes, and then places all small BARs of a kind at one address, which is in a
    /// picture if there is one.
    fn stack(&mut self, between: &mut dyn FnMut(&Self)) {
        self.list[..self.used]
            .iter_mut()
            .for_each(|it| it.bar.flags |= u32::from(!it.size()) << 31);
        let picture = self.list[..self.used].iter().find(|it| it.bar.length >= LARGE);
        let picture = picture.map(|it| it.now + LARGE / 2);
        for index in 0..self.used {
            let it = self.list[index];
            let memory = it.bar.flags & 1 == 0 && it.bar.length < LARGE;
            let place = if it.is_wide() { Some(self.arena) } else { picture };
            if let Some(place) = place.filter(|_| memory) {
                self.list[index].write(place, false);
                between(self);
            }
        }
    }

    /// Returns all BARs to their first places.
    pub(crate) fn home(&mut self) {
        self.list[..self.used].iter_mut().for_each(|it| it.write(it.home, false));
    }

    /// The number of BARs with a wrong size or address.
    pub(crate) fn wrong(&self) -> u64 {
        let is_wrong = |it: &&Place| {
            let address = it.at.memory(it.bar.index);
            it.bar.flags >> 31 != 0 || it.bar.flags & 1 == 0 && address != Some(it.now)
        };
        self.list[..self.used].iter().filter(is_wrong).count() as u64
    }

    fn each_function(&self, change: impl Fn(u32) -> u32) {
        for (index, it) in self.list[..self.used].iter().enumerate() {
            let before = index.checked_sub(1).map(|before| self.list[before].at);
            let known = before.is_some_and(|other| {
                (other.device, other.function) == (it.at.device, it.at.function)
            });
            if !known {
                it.at.write_command(change(it.at.read(COMMAND)));
            }
        }
    }

    /// The picture's address, if processors reach it without a window.
    fn picture(&self) -> Option<u64> {
        let large = |it: &&Place| it.bar.length >= LARGE && it.now + it.bar.length <= 1 << 32;
        self.list[..self.used].iter().find(large).map(|it| it.now)
    }

    /// Writes words to the picture, away from the stack.
    pub(crate) fn draw(&self, seed: u64) {
        if let Some(picture) = self.picture() {
            (0..WORDS).for_each(|word| write64(picture + word * STEP, seed ^ (word << 32)));
        }
    }

    /// The number of wrong words in the picture.
    pub(crate) fn wrong_words(&self, seed: u64) -> u64 {
        let Some(picture) = self.picture() else { return 0 };
        let is_wrong = |word: &u64| read64(picture + word * STEP) != seed ^ (word << 32);
        (0..WORDS).filter(is_wrong).count() as u64
    }

    /// Reads a byte of the picture, so that the machine maps it where it is now.
    pub(crate) fn look(&self) {
        if let Some(picture) = self.picture() {
            read8(picture);
        }
    }
}
