//! NTLMv2 as the server ([MS-NLMP]). Older NTLM, anonymous logins and guests are refused.
//!
//! Threats: the client chooses every offset and length. A proof covers the client's flags, so a
//! stripped message integrity code (MIC) is noticed.

use subtle::ConstantTimeEq;

use crate::hash::{hmac_md5, md4, md5, rc4};
use crate::status::{Answer, Status};
use crate::wire::{Get, Put, index, size16, size32, text, utf16};

pub const SIGNATURE: &[u8] = b"NTLMSSP\0";
/// The longest message: names, two responses and a key.
const MAX_MESSAGE: usize = 16 << 10;

mod flag {
    pub(super) const UNICODE: u32 = 1;
    pub(super) const REQUEST_TARGET: u32 = 4;
    pub(super) const SIGN: u32 = 0x10;
    pub(super) const SEAL: u32 = 0x20;
    pub(super) const NTLM: u32 = 0x200;
    pub(super) const ALWAYS_SIGN: u32 = 0x8000;
    pub(super) const TARGET_TYPE_SERVER: u32 = 0x2_0000;
    pub(super) const EXTENDED_SECURITY: u32 = 0x8_0000;
    pub(super) const TARGET_INFO: u32 = 0x80_0000;
    pub(super) const VERSION: u32 = 0x200_0000;
    pub(super) const BITS_128: u32 = 0x2000_0000;
    pub(super) const KEY_EXCHANGE: u32 = 0x4000_0000;
    pub(super) const BITS_56: u32 = 0x8000_0000;
}

/// Windows 6.1, revision 15 of NTLM, as Samba says it.
const VERSION: [u8; 8] = [6, 1, 0, 0, 0, 0, 0, 15];

/// The one account of a server.
pub struct Account {
    user: String,
    nt_hash: [u8; 16],
}

impl Account {
    pub fn new(user: &str, password: &str) -> Self {
        Self { user: user.to_owned(), nt_hash: md4(&utf16(password)) }
    }

    /// The key of a user in a domain, as the client spells both (NTOWFv2).
    fn key(&self, user: &str, domain: &str) -> [u8; 16] {
        hmac_md5(&self.nt_hash, &[&utf16(&user.to_uppercase()), &utf16(domain)])
    }
}

/// The messages of one login so far.
pub struct Challenge {
    nonce: [u8; 8],
    negotiate: Vec<u8>,
    pub message: Vec<u8>,
}

impl Challenge {
    /// Answers a NEGOTIATE_MESSAGE. `now` is a FILETIME, `host` a name of at most 15 letters.
    pub fn new(negotiate: &[u8], nonce: [u8; 8], now: u64, host: &str) -> Answer<Self> {
        if kind(negotiate)? != 1 {
            return Err(Status::INVALID_PARAMETER);
        }
        let wanted = negotiate.u32_at(12)?;
        let optional = flag::SIGN | flag::SEAL | flag::KEY_EXCHANGE | flag::BITS_56;
        let flags = wanted & optional
            | flag::UNICODE
            | flag::REQUEST_TARGET
            | flag::NTLM
            | flag::ALWAYS_SIGN
            | flag::TARGET_TYPE_SERVER
            | flag::EXTENDED_SECURITY
            | flag::TARGET_INFO
            | flag::VERSION
            | flag::BITS_128;
        let name = utf16(host);
        let mut pairs = Vec::new();
        // NetBIOS and DNS names of computer and domain, then the time.
        for id in [2, 1, 4, 3] {
            pairs.put16(id).put16(size16(name.len())).put(&name);
        }
        pairs.put16(7).put16(8).put64(now).put32(0);
        let mut message = SIGNATURE.to_vec();
        message.put32(2);
        put_field(&mut message, name.len(), 56);
        message.put32(flags).put(&nonce).put64(0);
        put_field(&mut message, pairs.len(), 56 + name.len());
        message.put(&VERSION).put(&name).put(&pairs);
        Ok(Self { nonce, negotiate: negotiate.to_vec(), message })
    }

    /// Checks an AUTHENTICATE_MESSAGE.
    pub fn check(&self, account: &Account, message: &[u8]) -> Answer<Login> {
        if kind(message)? != 3 {
            return Err(Status::INVALID_PARAMETER);
        }
        let (user, domain) = (text(field(message, 36)?)?, text(field(message, 28)?)?);
        let response = field(message, 20)?;
        let flags = message.u32_at(60)?;
        // An NTLMv1 response has 24 bytes, an anonymous one none.
        let (Some((proof, blob)), true) = (response.split_first_chunk::<16>(), response.len() > 44)
        else {
            return Err(Status::LOGON_FAILURE);
        };
        let key = account.key(&user, &domain);
        let right = hmac_md5(&key, &[&self.nonce, blob]);
        let known = user.to_lowercase() == account.user.to_lowercase();
        let strong = flags & flag::EXTENDED_SECURITY != 0 && flags & flag::BITS_128 != 0;
        if !(bool::from(right.ct_eq(proof)) && known && strong) {
            return Err(Status::LOGON_FAILURE);
        }
        let mut session_key = hmac_md5(&key, &[&right]);
        if flags & flag::KEY_EXCHANGE != 0 {
            let sent = field(message, 52)?.first_chunk::<16>().ok_or(Status::LOGON_FAILURE)?;
            let mut exchanged = *sent;
            rc4(&session_key, &mut exchanged);
            session_key = exchanged;
        }
        let login = Login { session_key, exchanged: flags & flag::KEY_EXCHANGE != 0 };
        if has_mic(blob)? && !self.mic_is_right(&login, message)? {
            return Err(Status::LOGON_FAILURE);
        }
        Ok(login)
    }

    fn mic_is_right(&self, login: &Login, message: &[u8]) -> Answer<bool> {
        const AT: usize = 72;
        let mic = message.span(AT, 16)?;
        let (head, tail) = (&message[..AT], &message[AT + 16..]);
        let parts = [&self.negotiate[..], &self.message, head, &[0; 16], tail];
        Ok(hmac_md5(&login.session_key, &parts).ct_eq(mic).into())
    }
}

fn kind(message: &[u8]) -> Answer<u32> {
    if message.len() > MAX_MESSAGE || !message.starts_with(SIGNATURE) {
        return Err(Status::INVALID_PARAMETER);
    }
    message.u32_at(8)
}

fn put_field(message: &mut Vec<u8>, length: usize, at: usize) {
    message.put16(size16(length)).put16(size16(length)).put32(size32(at));
}

fn field(message: &[u8], at: usize) -> Answer<&[u8]> {
    message.span(index(message.u32_at(at + 4)?), message.u16_at(at)?.into())
}

/// Whether the client promises a MIC in its list of attributes (MsvAvFlags).
fn has_mic(blob: &[u8]) -> Answer<bool> {
    let mut at = 28;
    loop {
        let (id, length) = (blob.u16_at(at)?, usize::from(blob.u16_at(at + 2)?));
        match id {
            0 => return Ok(false),
            6 => return Ok(blob.u32_at(at + 4)? & 2 != 0),
            _ => at += 4 + length,
        }
    }
}

/// A successful login.
pub struct Login {
    pub session_key: [u8; 16],
    exchanged: bool,
}

impl Login {
    fn key(&self, from_server: bool, purpose: &str) -> [u8; 16] {
        let way = if from_server { "server-to-client" } else { "client-to-server" };
        let magic = format!("session key to {way} {purpose} key magic constant\0");
        md5(&[&self.session_key, magic.as_bytes()])
    }

    /// The first signature of one side over a message ([MS-NLMP] 3.4.4.2).
    pub fn signature(&self, from_server: bool, message: &[u8]) -> [u8; 16] {
        let digest = hmac_md5(&self.key(from_server, "signing"), &[&[0; 4], message]);
        let mut signature = [0; 16];
        signature[0] = 1;
        signature[4..12].copy_from_slice(&digest[..8]);
        if self.exchanged {
            rc4(&self.key(from_server, "sealing"), &mut signature[4..12]);
        }
        signature
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::hash::test::hex;

    /// [MS-NLMP] 4.2: user `User`, domain `Domain`, password `Password`.
    const TEMP: &str = "01010000000000000000000000000000aaaaaaaaaaaaaaaa00000000
         02000c0044006f006d00610069006e0001000c00530065007200760065007200 0000000000000000";
    const PROOF: &str = "68cd0ab851e51c96aabc927bebef6a1c";

    fn challenge() -> Challenge {
        let nonce = hex("0123456789abcdef").try_into().unwrap();
        Challenge { nonce, negotiate: Vec::new(), message: Vec::new() }
    }

    fn authenticate(user: &str, response: &[u8], key: &[u8]) -> Vec<u8> {
        let mut payload = Vec::new();
        let mut message = SIGNATURE.to_vec();
        message.put32(3);
        for part in [&[0_u8; 0][..], response, &utf16("Domain"), &utf16(user), &[], key] {
            put_field(&mut message, part.len(), 88 + payload.len());
            payload.put(part);
        }
        let flags = flag::EXTENDED_SECURITY | flag::BITS_128 | flag::KEY_EXCHANGE;
        message.put32(flags).put(&VERSION).put(&[0; 16]).put(&payload);
        message
    }

    #[test]
    fn the_values_of_ms_nlmp_4_2_4() {
        let account = Account::new("User", "Password");
        assert_eq!(account.nt_hash.to_vec(), hex("a4f49c406510bdcab6824ee7c30fd852"));
        let key = account.key("User", "Domain");
        assert_eq!(key.to_vec(), hex("0c868a403bfd7a93a3001ef22ef02e3f"));
        let response = [hex(PROOF), hex(TEMP)].concat();
        let sent = hex("c5dad2544fc9799094ce1ce90bc9d03e");
        let login = challenge().check(&account, &authenticate("User", &response, &sent)).unwrap();
        assert_eq!(login.session_key, [0x55; 16]);
        assert_eq!(
            hmac_md5(&key, &[&hex(PROOF)]).to_vec(),
            hex("8de40ccadbc14a82f15cb0ad0de95ca3")
        );
    }

    #[test]
    fn a_sealed_message_is_that_of_ms_nlmp_4_2_4_4() {
        let login = Login { session_key: [0x55; 16], exchanged: false };
        let signing = hex("4788dc861b4782f35d43fd98fe1a2d39");
        assert_eq!(login.key(false, "signing").to_vec(), signing);
        let message = utf16("Plaintext");
        let checksum = &login.signature(false, &message)[4..12];
        let mut sealed = [&message, checksum].concat();
        rc4(&login.key(false, "sealing"), &mut sealed);
        let expected = "54e50165bf1936dc996020c1811b0f06fb5f 7fb38ec5c55d4976";
        assert_eq!(sealed, hex(expected));
    }

    #[test]
    fn other_users_passwords_and_old_responses_are_refused() {
        let account = Account::new("User", "Password");
        let good = [hex(PROOF), hex(TEMP)].concat();
        let sent = hex("c5dad2544fc9799094ce1ce90bc9d03e");
        let check = |account: &Account, message: &[u8]| challenge().check(account, message).err();
        let refused = Some(Status::LOGON_FAILURE);
        assert_eq!(check(&account, &authenticate("Guest", &good, &sent)), refused);
        assert_eq!(check(&account, &authenticate("", &[], &[])), refused);
        assert_eq!(check(&account, &authenticate("User", &[0; 24], &sent)), refused);
        let other = Account::new("User", "password");
        assert_eq!(check(&other, &authenticate("User", &good, &sent)), refused);
        let whole = authenticate("User", &good, &sent);
        for length in 0..whole.len() {
            assert!(check(&account, &whole[..length]).is_some(), "{length}");
        }
    }

    #[test]
    fn a_promised_mic_is_checked() {
        let account = Account::new("User", "Password");
        let key = account.key("User", "Domain");
        let challenge = challenge();
        let mut blob = hex(TEMP);
        blob.splice(28..28, [6, 0, 4, 0, 2, 0, 0, 0]);
        let proof = hmac_md5(&key, &[&challenge.nonce, &blob]);
        let mut session = [0x55; 16];
        rc4(&hmac_md5(&key, &[&proof]), &mut session);
        let mut message = authenticate("User", &[&proof[..], &blob].concat(), &session);
        assert!(challenge.check(&account, &message).is_err());
        let mic = hmac_md5(&[0x55; 16], &[&message]);
        message[72..88].copy_from_slice(&mic);
        assert!(challenge.check(&account, &message).is_ok());
    }
}
