//! The header and the XML data of a WIM or ESD file ("Windows Imaging File Format", Microsoft
//! 2007): the images in it. Both are never compressed, so nothing else is read.
//!
//! Threats: the XML may be anywhere and of any length. At most 4 MiB of it are read, and at most
//! [`MAX_IMAGES`] images and [`MAX_LANGUAGES`] languages are kept, with short names.

pub(crate) mod header;

use anyhow::{Context as _, bail, ensure};

use self::header::{Resource, flag};
use super::xml::{self, Event};
use super::{Content, Image, Truncated, u16_at, u32_at};

const MAX_XML: u64 = 4 << 20;
const MAX_IMAGES: usize = 128;
const MAX_LANGUAGES: usize = 64;
/// Maximum length of a name in characters. Longer ones are cut.
const MAX_NAME: usize = 100;

/// A processor architecture (`PROCESSOR_ARCHITECTURE_*` of the Windows SDK).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Architecture {
    X86,
    Arm,
    Ia64,
    Amd64,
    Arm64,
    #[default]
    Unknown,
}

impl Architecture {
    fn of(number: &str) -> Self {
        match number {
            "0" => Self::X86,
            "5" => Self::Arm,
            "6" => Self::Ia64,
            "9" => Self::Amd64,
            "12" => Self::Arm64,
            _ => Self::Unknown,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::X86 => "x86",
            Self::Arm => "ARM",
            Self::Ia64 => "Itanium",
            Self::Amd64 => "x64",
            Self::Arm64 => "ARM64",
            Self::Unknown => "an unknown architecture",
        }
    }
}

/// An image: an edition of Windows, or a part of its setup.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    /// From 1.
    pub index: u32,
    pub name: String,
    /// The name for people. Empty in images that are not Microsoft's.
    pub display_name: String,
    /// As in `Professional` or `ServerStandardEval`.
    pub edition_id: String,
    /// `Client`, `Server`, `Server Core` or `WindowsPE`.
    pub installation_type: String,
    pub architecture: Architecture,
    pub version: Version,
    pub languages: Vec<String>,
    pub default_language: String,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Version {
    pub major: u32,
    pub minor: u32,
    pub build: u32,
    /// The number of the update that the image contains.
    pub service_pack_build: u32,
}

/// Reads the images of a WIM that is a file of a CD.
pub fn images(image: &(impl Image + ?Sized), file: &Content) -> anyhow::Result<Vec<Entry>> {
    let mut header = [0; header::BYTES];
    ensure!(file.length() >= header.len() as u64, "{} bytes are no WIM", file.length());
    file.read(image, &mut header, 0)?;
    ensure!(header.starts_with(header::MAGIC), "no MSWIM at its start");
    let length = u32_at(&header, header::LENGTH)?;
    ensure!(usize::try_from(length)? == header.len(), "a header of {length} bytes");
    let (part, parts) = (u16_at(&header, header::PARTS)?, u16_at(&header, header::PARTS + 2)?);
    ensure!(part <= 1, "part {part} of {parts}: only the first part has all names");
    let bytes = xml_data(image, file, &header)?;
    let images = parse(&header::text(&bytes)?).context("XML data")?;
    let count = u32_at(&header, header::IMAGES)?;
    ensure!(
        usize::try_from(count) == Ok(images.len()),
        "the header has {count} images, and the XML data {}",
        images.len()
    );
    Ok(images)
}

/// The XML data (`rhXmlData`).
fn xml_data(
    image: &(impl Image + ?Sized),
    file: &Content,
    header: &[u8; header::BYTES],
) -> anyhow::Result<Vec<u8>> {
    let resource = Resource::read(header, header::XML)?;
    let Resource { packed: length, offset, .. } = resource;
    ensure!(!resource.has(flag::COMPRESSED), "its XML data is compressed or encrypted");
    ensure!(length <= MAX_XML, "XML data of {length} bytes");
    let end = offset.checked_add(length).context("XML data beyond all files")?;
    if end > file.length() {
        return Err(Truncated { length: file.length(), needed: end }.into());
    }
    let mut bytes = vec![0; usize::try_from(length)?];
    file.read(image, &mut bytes, offset)?;
    Ok(bytes)
}

/// Reads the `IMAGE` elements.
fn parse(text: &str) -> anyhow::Result<Vec<Entry>> {
    let mut images: Vec<Entry> = Vec::new();
    xml::read(text, |event| {
        match event {
            Event::Start(["WIM", "IMAGE"], attributes) => {
                let index = xml::attribute(attributes, "INDEX")?;
                let index = index.and_then(|it| it.parse().ok()).context("IMAGE without INDEX")?;
                ensure!(images.len() < MAX_IMAGES, "more than {MAX_IMAGES} images");
                images.push(Entry { index, ..Entry::default() });
            }
            Event::Text(["WIM", "IMAGE", path @ ..], text) => {
                let Some(image) = images.last_mut() else { bail!("text before an image") };
                image.set(path, &text);
            }
            _ => {}
        }
        Ok(())
    })?;
    Ok(images)
}

impl Entry {
    /// Sets the field of the element at this path. Elements that are unknown are ignored.
    fn set(&mut self, path: &[&str], text: &str) {
        let number = || text.parse().unwrap_or_default();
        match path {
            ["NAME"] => self.name = short(text),
            ["DISPLAYNAME"] => self.display_name = short(text),
            ["WINDOWS", "ARCH"] => self.architecture = Architecture::of(text),
            ["WINDOWS", "EDITIONID"] => self.edition_id = short(text),
            ["WINDOWS", "INSTALLATIONTYPE"] => self.installation_type = short(text),
            ["WINDOWS", "LANGUAGES", "LANGUAGE"] if self.languages.len() < MAX_LANGUAGES => {
                self.languages.push(short(text));
            }
            ["WINDOWS", "LANGUAGES", "DEFAULT"] => self.default_language = short(text),
            ["WINDOWS", "VERSION", "MAJOR"] => self.version.major = number(),
            ["WINDOWS", "VERSION", "MINOR"] => self.version.minor = number(),
            ["WINDOWS", "VERSION", "BUILD"] => self.version.build = number(),
            ["WINDOWS", "VERSION", "SPBUILD"] => self.version.service_pack_build = number(),
            _ => {}
        }
    }
}

/// A name that can be shown: short, and without control characters.
fn short(text: &str) -> String {
    text.chars().filter(|it| !it.is_control()).take(MAX_NAME).collect()
}
