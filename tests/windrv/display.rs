//! `stdvga`'s code for its hardware on the display. The host compares each picture, as a whole.

use anyhow::{Context, Result};
use transom_tests::program::vmm;

use crate::drivers::DRIVERS;
use crate::image;

#[test]
fn stdvga() -> Result<()> {
    let Some(image) = image::image()? else { return Ok(()) };
    let driver = DRIVERS.iter().find(|it| it.name == "stdvga").context("not in the list")?;
    driver.run("modes", image, vmm(), &[])
}
