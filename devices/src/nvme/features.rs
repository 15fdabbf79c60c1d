//! Get Features and Set Features (NVMe 1.4, 5.15 and 5.21). A reset restores all defaults.

use std::sync::atomic::Ordering;

use serde::{Deserialize, Serialize};

use super::Shared;
use super::command::{Answer, Command, Status};
use super::io::{EVERY_NAMESPACE, NAMESPACE};

const ARBITRATION: u8 = 0x01;
const POWER: u8 = 0x02;
const THRESHOLD: u8 = 0x04;
const RECOVERY: u8 = 0x05;
const CACHE: u8 = 0x06;
const QUEUES: u8 = 0x07;
const COALESCING: u8 = 0x08;
const VECTOR: u8 = 0x09;
const ATOMICITY: u8 = 0x0a;
const EVENTS: u8 = 0x0b;

/// Set Features: save the value across resets.
const SAVE: u32 = 1 << 31;
/// Select field of Get Features.
const CURRENT: u32 = 0;
const CAPABILITIES: u32 = 3;
/// Capability bits: namespace specific, changeable.
const PER_NAMESPACE: u32 = 1 << 1;
const CHANGEABLE: u32 = 1 << 2;

/// Asynchronous event configuration: namespace attribute notices, and temperature warnings.
const NAMESPACE_NOTICES: u32 = 1 << 8;
const TEMPERATURE_NOTICES: u32 = 1 << 1;

/// The reported temperature, in kelvin. It is constant, because a disk image has no sensor.
pub(super) const TEMPERATURE: u16 = 313;
/// Warning and critical temperature thresholds, in kelvin.
pub(super) const WARNING: u16 = 343;
pub(super) const CRITICAL: u16 = 373;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Features {
    arbitration: u32,
    over: u16,
    under: u16,
    recovery: u32,
    coalescing: u32,
    /// Vectors for which coalescing is disabled.
    vectors: Vec<u16>,
    atomicity: u32,
    events: u32,
}

impl Default for Features {
    fn default() -> Self {
        Self {
            arbitration: 0,
            over: WARNING,
            under: 0,
            recovery: 0,
            coalescing: 0,
            vectors: Vec::new(),
            atomicity: 0,
            events: NAMESPACE_NOTICES,
        }
    }
}

impl Features {
    pub(super) fn reports_namespace_changes(&self) -> bool {
        self.events & NAMESPACE_NOTICES != 0
    }

    pub(super) fn is_too_warm_or_cold(&self) -> bool {
        TEMPERATURE >= self.over || TEMPERATURE <= self.under
    }

    pub(super) fn reports_temperature(&self) -> bool {
        self.is_too_warm_or_cold() && self.events & TEMPERATURE_NOTICES != 0
    }

    pub(super) fn is_valid(&self, shared: &Shared) -> bool {
        self.vectors.len() <= usize::from(shared.vectors())
    }

    pub(super) fn get(&self, shared: &Shared, command: &Command) -> Answer {
        let [feature, select, ..] = command.dword(10).to_le_bytes();
        let argument = command.dword(11);
        match u32::from(select & 7) {
            CURRENT => {
                if feature == RECOVERY && command.nsid() != NAMESPACE {
                    return Err(Status::INVALID_NAMESPACE);
                }
                let cache = shared.caches();
                self.value(shared, feature, argument).map(|value| match feature {
                    CACHE => cache.into(),
                    _ => value,
                })
            }
            // No value can be saved, so the default is returned.
            1 | 2 => Self::default().value(shared, feature, argument),
            CAPABILITIES => {
                Self::default().value(shared, feature, argument & !0xffff)?;
                let scope = if feature == RECOVERY { PER_NAMESPACE } else { 0 };
                Ok(CHANGEABLE | scope)
            }
            _ => Err(Status::INVALID_FIELD),
        }
    }

    fn value(&self, shared: &Shared, feature: u8, argument: u32) -> Answer {
        Ok(match feature {
            ARBITRATION => self.arbitration,
            POWER => 0,
            THRESHOLD => match threshold(argument)? {
                Threshold::Over => self.over.into(),
                Threshold::Under => self.under.into(),
            },
            RECOVERY => self.recovery,
            CACHE => 1,
            QUEUES => u32::from(shared.queues - 1) * 0x1_0001,
            COALESCING => self.coalescing,
            VECTOR => {
                let vector = vector(shared, argument)?;
                u32::from(vector) | u32::from(self.vectors.contains(&vector)) << 16
            }
            ATOMICITY => self.atomicity,
            EVENTS => self.events,
            _ => return Err(Status::INVALID_FIELD),
        })
    }

    /// The caller flushes if the cache is disabled. `used`: I/O queues exist.
    pub(super) fn set(&mut self, shared: &Shared, command: &Command, used: bool) -> Answer {
        let [feature, ..] = command.dword(10).to_le_bytes();
        let argument = command.dword(11);
        // An unknown feature is reported before any other error.
        Self::default().value(shared, feature, if feature == VECTOR { 0 } else { argument })?;
        if command.dword(10) & SAVE != 0 {
            return Err(Status::NOT_SAVEABLE);
        }
        match (feature, command.nsid()) {
            (RECOVERY, NAMESPACE | EVERY_NAMESPACE) | (_, 0 | EVERY_NAMESPACE) => {}
            (RECOVERY, _) => return Err(Status::INVALID_NAMESPACE),
            _ => return Err(Status::NOT_PER_NAMESPACE),
        }
        if (feature, command.nsid()) == (RECOVERY, 0) {
            return Err(Status::INVALID_NAMESPACE);
        }
        match feature {
            ARBITRATION => self.arbitration = argument,
            // There is only one power state.
            POWER if argument & 0x1f != 0 => return Err(Status::INVALID_FIELD),
            THRESHOLD => {
                let [low, high, ..] = argument.to_le_bytes();
                let kelvin = u16::from_le_bytes([low, high]);
                match threshold(argument)? {
                    Threshold::Over => self.over = kelvin,
                    Threshold::Under => self.under = kelvin,
                }
            }
            // Deallocated or Unwritten Logical Block Error is not supported.
            RECOVERY if argument & 1 << 16 != 0 => return Err(Status::INVALID_FIELD),
            RECOVERY => self.recovery = argument & 0xffff,
            CACHE => shared.cache.store(argument & 1 != 0, Ordering::SeqCst),
            QUEUES => return queues(shared, argument, used),
            COALESCING => self.coalescing = argument & 0xffff,
            VECTOR => {
                let vector = vector(shared, argument)?;
                self.vectors.retain(|it| *it != vector);
                if argument & 1 << 16 != 0 {
                    self.vectors.push(vector);
                }
            }
            ATOMICITY => self.atomicity = argument & 1,
            EVENTS => self.events = argument,
            _ => {}
        }
        Ok(0)
    }
}

enum Threshold {
    Over,
    Under,
}

fn threshold(argument: u32) -> Result<Threshold, Status> {
    // Sensor 0 is the composite temperature, 15 stands for all sensors.
    match (argument >> 16 & 0xf, argument >> 20 & 3) {
        (0 | 0xf, 0) => Ok(Threshold::Over),
        (0 | 0xf, 1) => Ok(Threshold::Under),
        _ => Err(Status::INVALID_FIELD),
    }
}

fn vector(shared: &Shared, argument: u32) -> Result<u16, Status> {
    let [low, high, ..] = argument.to_le_bytes();
    let vector = u16::from_le_bytes([low, high]);
    if vector < shared.vectors() { Ok(vector) } else { Err(Status::INVALID_FIELD) }
}

/// The answer is always the number of queues that exist.
fn queues(shared: &Shared, argument: u32, used: bool) -> Answer {
    if used {
        return Err(Status::SEQUENCE);
    }
    if argument & 0xffff == 0xffff || argument >> 16 == 0xffff {
        return Err(Status::INVALID_FIELD);
    }
    Ok(u32::from(shared.queues - 1) * 0x1_0001)
}

/// If so, the caller must flush the cache.
pub(super) fn disables_cache(command: &Command) -> bool {
    let [feature, ..] = command.dword(10).to_le_bytes();
    feature == CACHE && command.dword(11) & 1 == 0
}
