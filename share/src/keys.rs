//! Keys of a session: signatures and encryption ([MS-SMB2] 3.1.4).
//!
//! AES-GCM, SHA-2 and HMAC are those of ring. AES-CMAC (RFC 4493) and AES-CCM (RFC 3610), which
//! only SMB 3.0 and 3.0.2 and older clients of 3.1.1 use, are modes over one block of the crate
//! `aes`.

use aes::Aes128;
use aes::cipher::consts::U16;
use aes::cipher::{
    BlockCipherEncBackend, BlockCipherEncClosure, BlockCipherEncrypt, BlockSizeUser, KeyInit,
};
use ring::aead::{AES_128_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use ring::{digest, hmac};
use subtle::ConstantTimeEq;

pub type Key = [u8; 16];
/// SHA-512 over the messages before a session's keys exist.
pub type Preauth = [u8; 64];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signing {
    HmacSha256,
    AesCmac,
    AesGmac,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cipher {
    Ccm,
    Gcm,
}

impl Cipher {
    /// Bytes of a nonce.
    pub const fn nonce(self) -> usize {
        match self {
            Self::Ccm => 11,
            Self::Gcm => 12,
        }
    }
}

pub struct Keys {
    signing: Signer,
    /// From the client, to the client.
    sealing: Option<(Sealer, Sealer)>,
}

/// The dialect's decisions about the keys of its sessions.
#[derive(Clone, Copy, Debug)]
pub struct Scheme {
    pub signing: Signing,
    pub cipher: Option<Cipher>,
    /// Set for SMB 3.1.1.
    pub preauth: Option<Preauth>,
    /// SMB 2.1 signs with the session key itself.
    pub derived: bool,
}

impl Keys {
    pub fn new(session_key: &Key, scheme: &Scheme) -> Self {
        let (sign, read, write) = match &scheme.preauth {
            Some(hash) => (
                derive(session_key, b"SMBSigningKey\0", hash),
                derive(session_key, b"SMBC2SCipherKey\0", hash),
                derive(session_key, b"SMBS2CCipherKey\0", hash),
            ),
            None => (
                derive(session_key, b"SMB2AESCMAC\0", b"SmbSign\0"),
                derive(session_key, b"SMB2AESCCM\0", b"ServerIn \0"),
                derive(session_key, b"SMB2AESCCM\0", b"ServerOut\0"),
            ),
        };
        let sign = if scheme.derived { sign } else { *session_key };
        let sealer = |cipher| (Sealer::new(cipher, &read), Sealer::new(cipher, &write));
        Self { signing: Signer::new(scheme.signing, &sign), sealing: scheme.cipher.map(sealer) }
    }

    /// The signature of a message whose signature field is zero. `header` are its first 64 bytes.
    pub fn sign(&self, message: &[u8], from_server: bool) -> [u8; 16] {
        self.signing.sign(message, from_server)
    }

    pub fn verify(&self, message: &[u8], signature: &[u8]) -> bool {
        self.signing.sign(message, false).ct_eq(signature).into()
    }

    pub fn can_encrypt(&self) -> bool {
        self.sealing.is_some()
    }

    /// Decrypts a message of the client in place.
    pub fn open(&self, nonce: &[u8], head: &[u8], tag: &[u8], data: &mut [u8]) -> bool {
        self.sealing.as_ref().is_some_and(|(read, _)| read.open(nonce, head, tag, data))
    }

    /// Encrypts a message to the client in place and returns its tag.
    pub fn seal(&self, nonce: &[u8], head: &[u8], data: &mut [u8]) -> Option<[u8; 16]> {
        self.sealing.as_ref().map(|(_, write)| write.seal(nonce, head, data))
    }

    pub fn nonce_length(&self) -> usize {
        match &self.sealing {
            Some((Sealer::Ccm(_), _)) => Cipher::Ccm.nonce(),
            _ => Cipher::Gcm.nonce(),
        }
    }
}

/// SP 800-108 in counter mode with HMAC-SHA256, for 128 bits.
fn derive(key: &Key, label: &[u8], context: &[u8]) -> Key {
    let mut mac = hmac::Context::with_key(&hmac::Key::new(hmac::HMAC_SHA256, key));
    for part in [&[0, 0, 0, 1][..], label, &[0], context, &[0, 0, 0, 128]] {
        mac.update(part);
    }
    *mac.sign().as_ref().first_chunk().expect("SHA-256 has 32 bytes")
}

/// Appends a message to a pre-authentication hash.
pub fn extend(hash: &mut Preauth, message: &[u8]) {
    let mut context = digest::Context::new(&digest::SHA512);
    context.update(hash);
    context.update(message);
    hash.copy_from_slice(context.finish().as_ref());
}

enum Signer {
    Hmac(hmac::Key),
    Cmac(Aes128),
    Gmac(LessSafeKey),
}

impl Signer {
    fn new(kind: Signing, key: &Key) -> Self {
        match kind {
            Signing::HmacSha256 => Self::Hmac(hmac::Key::new(hmac::HMAC_SHA256, key)),
            Signing::AesCmac => Self::Cmac(Aes128::new(key.into())),
            Signing::AesGmac => Self::Gmac(gcm(key)),
        }
    }

    fn sign(&self, message: &[u8], from_server: bool) -> [u8; 16] {
        match self {
            Self::Hmac(key) => {
                let tag = hmac::sign(key, message);
                *tag.as_ref().first_chunk().expect("SHA-256 has 32 bytes")
            }
            Self::Cmac(key) => cmac(key, message),
            Self::Gmac(key) => {
                // [MS-SMB2] 3.1.4.1: message id, then role and whether it is a CANCEL.
                let mut nonce = [0; 12];
                nonce[..8].copy_from_slice(&message[24..32]);
                nonce[8] = u8::from(from_server) | u8::from(message[12..14] == [0x0c, 0]) << 1;
                let nonce = Nonce::assume_unique_for_key(nonce);
                let tag = key.seal_in_place_separate_tag(nonce, Aad::from(message), &mut []);
                let tag = tag.expect("the message is shorter than 64 GiB");
                *tag.as_ref().first_chunk().expect("GCM's tag has 16 bytes")
            }
        }
    }
}

enum Sealer {
    Ccm(Aes128),
    Gcm(LessSafeKey),
}

impl Sealer {
    fn new(cipher: Cipher, key: &Key) -> Self {
        match cipher {
            Cipher::Ccm => Self::Ccm(Aes128::new(key.into())),
            Cipher::Gcm => Self::Gcm(gcm(key)),
        }
    }

    fn seal(&self, nonce: &[u8], head: &[u8], data: &mut [u8]) -> [u8; 16] {
        match self {
            Self::Ccm(key) => {
                let tag = ccm_tag(key, nonce, head, data);
                ccm_crypt(key, nonce, data);
                tag
            }
            Self::Gcm(key) => {
                let nonce = Nonce::try_assume_unique_for_key(nonce).expect("nonces have 12 bytes");
                let tag = key.seal_in_place_separate_tag(nonce, Aad::from(head), data);
                let tag = tag.expect("the message is shorter than 64 GiB");
                *tag.as_ref().first_chunk().expect("GCM's tag has 16 bytes")
            }
        }
    }

    fn open(&self, nonce: &[u8], head: &[u8], tag: &[u8], data: &mut [u8]) -> bool {
        match self {
            Self::Ccm(key) => {
                ccm_crypt(key, nonce, data);
                ccm_tag(key, nonce, head, data).ct_eq(tag).into()
            }
            Self::Gcm(key) => {
                let Ok(nonce) = Nonce::try_assume_unique_for_key(nonce) else { return false };
                let Ok(tag) = tag.try_into() else { return false };
                key.open_in_place_separate_tag(nonce, Aad::from(head), tag, data, 0..).is_ok()
            }
        }
    }
}

fn gcm(key: &Key) -> LessSafeKey {
    LessSafeKey::new(UnboundKey::new(&AES_128_GCM, key).expect("the key has 16 bytes"))
}

fn encrypt(key: &Aes128, block: &mut [u8; 16]) {
    key.encrypt_block(block.into());
}

/// Combines each 16 bytes of a message with the state, and encrypts the state. It runs within the
/// cipher, which prepares the key for many blocks at each call: for single ones, that takes longer
/// than the blocks.
struct Chain<'a> {
    state: &'a mut [u8; 16],
    message: &'a [u8],
}

impl BlockSizeUser for Chain<'_> {
    type BlockSize = U16;
}

impl BlockCipherEncClosure for Chain<'_> {
    fn call<B: BlockCipherEncBackend<BlockSize = U16>>(self, cipher: &B) {
        let (blocks, rest) = self.message.as_chunks::<16>();
        for block in blocks {
            xor(self.state, block);
            cipher.encrypt_block_inplace((&mut *self.state).into());
        }
        if !rest.is_empty() {
            xor(self.state, rest);
            cipher.encrypt_block_inplace((&mut *self.state).into());
        }
    }
}

fn chain(key: &Aes128, state: &mut [u8; 16], message: &[u8]) {
    key.encrypt_with_backend(Chain { state, message });
}

fn xor(block: &mut [u8; 16], bytes: &[u8]) {
    for (to, from) in block.iter_mut().zip(bytes) {
        *to ^= from;
    }
}

/// Multiplies by x in GF(2^128), as CMAC's subkeys need.
fn double(block: [u8; 16]) -> [u8; 16] {
    let value = u128::from_be_bytes(block);
    ((value << 1) ^ ((value >> 127) * 0x87)).to_be_bytes()
}

fn cmac(key: &Aes128, message: &[u8]) -> [u8; 16] {
    let mut subkey = [0; 16];
    encrypt(key, &mut subkey);
    let subkey = double(subkey);
    let last = message.len().saturating_sub(1) / 16 * 16;
    let (head, tail) = message.split_at(last);
    let mut state = [0; 16];
    chain(key, &mut state, head);
    xor(&mut state, tail);
    if tail.len() == 16 {
        xor(&mut state, &subkey);
    } else {
        state[tail.len()] ^= 0x80;
        xor(&mut state, &double(subkey));
    }
    encrypt(key, &mut state);
    state
}

/// A block of CCM with a nonce of 11 bytes and a counter of 4.
fn ccm_block(flags: u8, nonce: &[u8], value: usize) -> [u8; 16] {
    let mut block = [0; 16];
    block[0] = flags;
    block[1..12].copy_from_slice(nonce);
    let value = u32::try_from(value).expect("messages are limited to a few MiB");
    block[12..].copy_from_slice(&value.to_be_bytes());
    block
}

/// Encrypts with the counter. Counters from 1 belong to the data.
fn ccm_crypt(key: &Aes128, nonce: &[u8], data: &mut [u8]) {
    // The cipher encrypts many blocks at once faster.
    const BLOCKS: usize = 64;
    for (count, chunk) in data.chunks_mut(16 * BLOCKS).enumerate() {
        let first = count * BLOCKS + 1;
        let mut blocks: [_; BLOCKS] =
            std::array::from_fn(|block| aes::Block::from(ccm_block(3, nonce, first + block)));
        key.encrypt_blocks(&mut blocks);
        for (to, from) in chunk.iter_mut().zip(blocks.iter().flatten()) {
            *to ^= from;
        }
    }
}

/// The encrypted tag over `head`, at most 65279 bytes, and the plain data.
fn ccm_tag(key: &Aes128, nonce: &[u8], head: &[u8], data: &[u8]) -> [u8; 16] {
    // Associated data, tags of 16 bytes, counters of 4.
    let mut state = ccm_block(0x40 | 7 << 3 | 3, nonce, data.len());
    encrypt(key, &mut state);
    let mut first = u16::try_from(head.len()).expect("heads are short").to_be_bytes().to_vec();
    first.extend(head);
    chain(key, &mut state, &first);
    chain(key, &mut state, data);
    let mut mask = ccm_block(3, nonce, 0);
    encrypt(key, &mut mask);
    xor(&mut state, &mask);
    state
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::hash::test::hex;

    fn key(text: &str) -> Key {
        hex(text).try_into().unwrap()
    }

    #[test]
    fn cmac_has_the_values_of_rfc_4493() {
        let aes = Aes128::new(&key("2b7e151628aed2a6abf7158809cf4f3c").into());
        let message = hex("6bc1bee22e409f96e93d7e117393172a ae2d8a571e03ac9c9eb76fac45af8e51
             30c81c46a35ce411e5fbc1191a0a52ef f69f2445df4f9b17ad2b417be66c3710");
        for (length, tag) in [
            (0, "bb1d6929e95937287fa37d129b756746"),
            (16, "070a16b46b4d4144f79bdd9dd04a287c"),
            (40, "dfa66747de9ae63030ca32611497c827"),
            (64, "51f0bebf7e3b9d92fc49741779363cfe"),
        ] {
            assert_eq!(cmac(&aes, &message[..length]).to_vec(), hex(tag), "{length}");
        }
    }

    #[test]
    fn ccm_is_that_of_other_programs() {
        // Made with Python's `cryptography`: AESCCM(key, 16).encrypt(nonce, data, head).
        let sealer = Sealer::new(Cipher::Ccm, &key("000102030405060708090a0b0c0d0e0f"));
        let (nonce, head) = (hex("101112131415161718191a"), hex("2021222324252627"));
        let mut data = *b"hello, shared folder";
        let tag = sealer.seal(&nonce, &head, &mut data);
        assert_eq!([&data[..], &tag].concat(), hex(CCM));
        assert!(sealer.open(&nonce, &head, &tag, &mut data));
        assert_eq!(&data, b"hello, shared folder");
        assert!(!sealer.open(&nonce, &head, &tag, &mut data));
    }

    const CCM: &str = "240a11b7af9171d8e66d9b064643f8c14d0cbd2b4573da78e263dc900636917aa1ed9e4e";

    #[test]
    fn keys_of_smb_3_0_are_those_that_microsoft_published() {
        // "SMB 2 and SMB 3 security in Windows 10: the anatomy of signing and cryptographic keys".
        let session = key("7CD451825D0450D235424E44BA6E78CC");
        let sign = derive(&session, b"SMB2AESCMAC\0", b"SmbSign\0");
        assert_eq!(sign, key("0B7E9C5CAC36C0F6EA9AB275298CEDCE"));
        let read = derive(&session, b"SMB2AESCCM\0", b"ServerIn \0");
        assert_eq!(read, key("FAD27796665B313EBB578F388632B4F7"));
        let write = derive(&session, b"SMB2AESCCM\0", b"ServerOut\0");
        assert_eq!(write, key("B0F0427F7CEB416D1D9DCC0CD4F99447"));
    }

    #[test]
    fn keys_of_smb_3_1_1_are_those_that_microsoft_published() {
        let session = key("270E1BA896585EEB7AF3472D3B4C75A7");
        let hash = hex("0DD13628CC3ED218EF9DF9772D436D0887AB9814BFAE63A80AA845F36909DB79
             28622DDDAD522D9751640A459762C5A9D6BB084CBB3CE6BDADEF5D5BCE3C6C01");
        for (label, expected) in [
            (&b"SMBSigningKey\0"[..], "73FE7A9A77BEF0BDE49C650D8CCB5F76"),
            (b"SMBC2SCipherKey\0", "629BCBC54422A0F572B97F45989B6073"),
            (b"SMBS2CCipherKey\0", "E2AF0DCEFAC68DA71A0DFBD0D1350D74"),
        ] {
            assert_eq!(derive(&session, label, &hash), key(expected));
        }
    }
}
