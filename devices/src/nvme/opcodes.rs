//! Opcodes of the admin command set (NVMe 1.4, 5).

use super::Shared;

pub(super) const DELETE_SUBMISSION: u8 = 0x00;
pub(super) const CREATE_SUBMISSION: u8 = 0x01;
pub(super) const LOG_PAGE: u8 = 0x02;
pub(super) const DELETE_COMPLETION: u8 = 0x04;
pub(super) const CREATE_COMPLETION: u8 = 0x05;
pub(super) const IDENTIFY: u8 = 0x06;
pub(super) const ABORT: u8 = 0x08;
pub(super) const SET_FEATURES: u8 = 0x09;
pub(super) const GET_FEATURES: u8 = 0x0a;
pub(super) const EVENT_REQUEST: u8 = 0x0c;
pub(super) const DOORBELL_BUFFER: u8 = 0x7c;

const OPCODES: &[u8] = &[
    DELETE_SUBMISSION,
    CREATE_SUBMISSION,
    LOG_PAGE,
    DELETE_COMPLETION,
    CREATE_COMPLETION,
    IDENTIFY,
    ABORT,
    SET_FEATURES,
    GET_FEATURES,
    EVENT_REQUEST,
    DOORBELL_BUFFER,
];

pub(super) fn offered(shared: &Shared) -> impl Iterator<Item = u8> {
    let offered = |it: &u8| *it != DOORBELL_BUFFER || shared.offers_shadows();
    OPCODES.iter().copied().filter(offered)
}
