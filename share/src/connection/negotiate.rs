//! NEGOTIATE ([MS-SMB2] 2.2.3): the dialect, signatures and encryption of a connection.

use crate::connection::Connection;
use crate::keys::{Cipher, Scheme, Signing};
use crate::message::{HEADER, Reply, Request};
use crate::server::{now, random};
use crate::spnego;
use crate::status::{Answer, Status};
use crate::wire::{Get, Put, index, size16, size32};

pub const SMB_2_1: u16 = 0x0210;
pub const SMB_3_0: u16 = 0x0300;
pub const SMB_3_1_1: u16 = 0x0311;
/// The answer to SMB 1: negotiate again, with SMB 2.
const ANY: u16 = 0x02ff;
/// From the best to the least.
const DIALECTS: [u16; 4] = [SMB_3_1_1, 0x0302, SMB_3_0, SMB_2_1];

/// The largest read, write and answer in bytes.
pub const MAX_DATA: u32 = 1 << 20;
/// Signatures are enabled and required.
const SECURITY_MODE: u16 = 3;
const LARGE_MTU: u32 = 4;
const ENCRYPTION: u32 = 0x40;

mod context {
    pub(super) const PREAUTH: u16 = 1;
    pub(super) const ENCRYPTION: u16 = 2;
    pub(super) const SIGNING: u16 = 8;
}
const SHA_512: u16 = 1;

/// A negotiated connection.
#[derive(Clone, Debug)]
pub struct Terms {
    pub dialect: u16,
    pub signing: Signing,
    pub cipher: Option<Cipher>,
    /// Whether the client asked for a signing algorithm.
    chose_signing: bool,
    /// The client's own words, for FSCTL_VALIDATE_NEGOTIATE_INFO.
    capabilities: u32,
    guid: [u8; 16],
    mode: u16,
    dialects: Vec<u16>,
    server_capabilities: u32,
}

impl Terms {
    pub fn scheme(&self, preauth: &[u8; 64]) -> Scheme {
        Scheme {
            signing: self.signing,
            cipher: self.cipher,
            preauth: (self.dialect == SMB_3_1_1).then_some(*preauth),
            derived: self.dialect >= SMB_3_0,
        }
    }

    fn parse(request: &Request<'_>) -> Answer<Self> {
        request.expect(36)?;
        let count = usize::from(request.u16(2)?);
        if count == 0 || count > 64 {
            return Err(Status::INVALID_PARAMETER);
        }
        let list = request.bytes.span(HEADER + 36, 2 * count)?;
        let dialects: Vec<_> = (0..count).map(|it| list.u16_at(2 * it)).collect::<Answer<_>>()?;
        let dialect = DIALECTS.into_iter().find(|it| dialects.contains(it));
        let dialect = dialect.ok_or(Status::NOT_SUPPORTED)?;
        let capabilities = request.u32(8)?;
        let mut terms = Self {
            dialect,
            signing: if dialect >= SMB_3_0 { Signing::AesCmac } else { Signing::HmacSha256 },
            cipher: None,
            chose_signing: false,
            capabilities,
            guid: *request.bytes.span(HEADER + 12, 16)?.first_chunk().expect("16 bytes"),
            mode: request.u16(4)?,
            dialects,
            server_capabilities: LARGE_MTU,
        };
        if dialect == SMB_3_1_1 {
            terms.read_contexts(request)?;
        } else if dialect >= SMB_3_0 && capabilities & ENCRYPTION != 0 {
            terms.cipher = Some(Cipher::Ccm);
            terms.server_capabilities |= ENCRYPTION;
        }
        Ok(terms)
    }

    fn read_contexts(&mut self, request: &Request<'_>) -> Answer<()> {
        let mut at = index(request.u32(28)?);
        let mut hashes = false;
        for _ in 0..request.u16(32)?.min(16) {
            at = at.checked_next_multiple_of(8).ok_or(Status::INVALID_PARAMETER)?;
            let (kind, length) = (request.bytes.u16_at(at)?, request.bytes.u16_at(at + 2)?);
            let data = request.bytes.span(at + 8, length.into())?;
            at += 8 + usize::from(length);
            let ids = |from: usize| -> Answer<Vec<u16>> {
                let count = usize::from(data.u16_at(0)?);
                let list = data.span(from, 2 * count)?;
                (0..count).map(|it| list.u16_at(2 * it)).collect()
            };
            match kind {
                context::PREAUTH => hashes |= ids(4)?.contains(&SHA_512),
                context::ENCRYPTION => {
                    let offered = ids(2)?;
                    let known = [(2, Cipher::Gcm), (1, Cipher::Ccm)];
                    let best = known.into_iter().find(|(id, _)| offered.contains(id));
                    self.cipher = best.map(|(_, cipher)| cipher);
                }
                context::SIGNING => {
                    let offered = ids(2)?;
                    let known =
                        [(2, Signing::AesGmac), (1, Signing::AesCmac), (0, Signing::HmacSha256)];
                    let best = known.into_iter().find(|(id, _)| offered.contains(id));
                    self.signing = best.ok_or(Status::NOT_SUPPORTED)?.1;
                    self.chose_signing = true;
                }
                _ => (),
            }
        }
        if hashes { Ok(()) } else { Err(Status::INVALID_PARAMETER) }
    }

    fn contexts(&self) -> Vec<u8> {
        if self.dialect != SMB_3_1_1 {
            return Vec::new();
        }
        let salt: [u8; 32] = random();
        let mut out = Vec::new();
        let mut put = |kind: u16, data: &[u8]| {
            out.pad(8).put16(kind).put16(size16(data.len())).put32(0).put(data);
        };
        let mut data = Vec::new();
        put(context::PREAUTH, data.put16(1).put16(32).put16(SHA_512).put(&salt));
        if let Some(cipher) = self.cipher {
            let id = if cipher == Cipher::Gcm { 2 } else { 1 };
            put(context::ENCRYPTION, &[1, 0, id, 0]);
        }
        if self.chose_signing {
            let id = match self.signing {
                Signing::HmacSha256 => 0,
                Signing::AesCmac => 1,
                Signing::AesGmac => 2,
            };
            put(context::SIGNING, &[1, 0, id, 0]);
        }
        out
    }

    fn context_count(&self) -> u16 {
        match self.dialect {
            SMB_3_1_1 => 1 + u16::from(self.cipher.is_some()) + u16::from(self.chose_signing),
            _ => 0,
        }
    }
}

impl Connection {
    pub(crate) fn negotiate(&mut self, request: &Request<'_>) -> Answer<Reply> {
        if self.terms.is_some() {
            return Err(Status::INVALID_PARAMETER);
        }
        let terms = Terms::parse(request)?;
        let body = self.negotiated(terms.dialect, Some(&terms));
        self.terms = Some(terms);
        Ok(Reply::new(body))
    }

    /// Answers SMB 1's NEGOTIATE if the client can do better.
    pub(crate) fn negotiate_smb1(&mut self, message: &[u8]) -> Option<Vec<u8>> {
        // [MS-CIFS] 2.2.4.52: the command, and strings after a count of bytes.
        let strings = message.get(35..)?;
        let modern = strings.split(|it| *it == 0).any(|it| it == b"\x02SMB 2.???");
        let first = self.terms.is_none() && message.get(4) == Some(&0x72);
        (modern && first).then(|| self.negotiated(ANY, None))
    }

    fn negotiated(&self, dialect: u16, terms: Option<&Terms>) -> Vec<u8> {
        let offer = spnego::offer();
        let mut body = Vec::new();
        let count = terms.map_or(0, Terms::context_count);
        body.put16(65).put16(SECURITY_MODE).put16(dialect).put16(count).put(&self.server.guid);
        body.put32(terms.map_or(LARGE_MTU, |it| it.server_capabilities));
        body.put32(MAX_DATA).put32(MAX_DATA).put32(MAX_DATA).put64(now()).put64(0);
        body.put16(128).put16(size16(offer.len())).put32(0).put(&offer);
        let contexts = terms.map(Terms::contexts).unwrap_or_default();
        if !contexts.is_empty() {
            body.pad(8);
            let at = size32(HEADER + body.len());
            body.set32(60, at);
            body.put(&contexts);
        }
        body
    }

    /// FSCTL_VALIDATE_NEGOTIATE_INFO: the client compares what both sides saw. None if an attacker
    /// has changed it; then the connection must end.
    pub(crate) fn validate_negotiation(&self, input: &[u8]) -> Option<Vec<u8>> {
        let terms = self.terms.as_ref().filter(|it| it.dialect < SMB_3_1_1)?;
        let count = usize::from(input.u16_at(22).ok()?);
        let dialects = (0..count).map(|it| input.u16_at(24 + 2 * it)).collect::<Answer<Vec<_>>>();
        let same = input.u32_at(0).ok()? == terms.capabilities
            && input.span(4, 16).ok()? == terms.guid
            && input.u16_at(20).ok()? == terms.mode
            && dialects.ok()? == terms.dialects;
        let mut out = Vec::new();
        out.put32(terms.server_capabilities).put(&self.server.guid);
        out.put16(SECURITY_MODE).put16(terms.dialect);
        same.then_some(out)
    }
}
